#!/usr/bin/env python3
"""Whether the shipped model answers in the container, on the GPU where the container sees one, and else by NumPy."""

import edgellm

print(f"EdgeLLM {edgellm.__version__}")
with edgellm.LLM() as llm:
    answer = llm.chat([{"role": "user", "content": "Where is the red cup?"}]).text
    print(answer)
assert "front left" in answer
