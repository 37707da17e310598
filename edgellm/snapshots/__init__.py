"""Snapshots of a prompt's KV cache, in memory and on disk, so that a system prompt is computed once.

A snapshot of N tokens holds the base model's KV rows 0..N-1 and, where a draft model is loaded, the draft's rows 0..N-2
(its entry i needs token i + 1). A sequence that begins with some of these tokens takes their rows and computes only
what follows; the last token it reuses is computed again, which regains feature and logits.
"""
