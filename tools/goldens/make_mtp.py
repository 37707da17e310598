"""Makes the golden files of `tests/goldens/mtp`: heads for multi-token prediction of bases in `tests/goldens/decoder`.

    python tools/goldens/make_mtp.py tests/goldens/mtp

Needs torch and transformers, as `make.py`. transformers leaves the tensors of these heads out, and runs none: what is
expected is put together here from its own layers (`Qwen3_5DecoderLayer`; two of `NemotronHBlock`), norms and rotary
embedding, in the order in which vLLM and others describe the head. Each folder is named after its base, which stays
where it is, and describes the random tensors of `mtp.safetensors`, named as in published files. `expected.safetensors`
holds `token_ids` [T] int64, `features` [T, H], the base's last hidden states behind its final norm, and what
`make_drafts.py` writes of a head; behind it `chain_tokens` [3], the likeliest one after another, with `chain_logits`
and `chain_hidden_states` of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from golden_folders import VERSIONS, draw_tensors, golden_folder, whole, with_shares, write_folders
from make_drafts import TOKENS, expected_values
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

BASES = ("qwen3_5_text", "qwen3_5_tied", "qwen3_5_moe_text", "nemotron_h_moe")
CHAIN = 3
_DECODERS = golden_folder("decoder")


class Qwen(torch.nn.Module):
    """The own weights of Qwen3.5's head, by their published names below "mtp."."""

    def __init__(self, config: object) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(hidden, epsilon)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(hidden, epsilon)
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        layer_class = Qwen3_5MoeDecoderLayer if hasattr(config, "num_experts") else Qwen3_5DecoderLayer
        self.layers = torch.nn.ModuleList([layer_class(config, config.layer_types.index("full_attention"))])
        self.norm = Qwen3_5RMSNorm(hidden, epsilon)
        self.rotary = Qwen3_5TextRotaryEmbedding(config)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What gives logits [1, T, H], of the next tokens' embeddings and the hidden states before them [1, T, H]."""
        joined = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        value, positions = self.fc(joined), torch.arange(mask.shape[-1])[None]
        return self.norm(self.layers[0](value, self.rotary(value, positions), mask, positions))

    def published(self) -> dict[str, torch.Tensor]:
        """The tensors as its makers publish them."""
        return {key: tensor for key, tensor in self.state_dict().items() if not key.startswith("rotary.")}

    def load(self, published: dict[str, torch.Tensor]) -> None:
        """Take them."""
        assert not self.load_state_dict(published, strict=False).unexpected_keys


class Nemotron(torch.nn.Module):
    """The same of Nemotron-H's: a block that attends, before which both inputs are normed and joined, and a mixture of
    experts, published one by one."""

    def __init__(self, config: object) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.layer_norm_epsilon
        types = config.layers_block_type
        self.layers = torch.nn.ModuleList(
            [NemotronHBlock(config, types.index(kind)) for kind in ("full_attention", "moe")]
        )
        self.layers[0].enorm, self.layers[0].hnorm = (NemotronHRMSNorm(hidden, epsilon) for _ in range(2))
        self.layers[0].eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layers[1].final_layernorm = NemotronHRMSNorm(hidden, epsilon)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        first, last = self.layers
        value = first.eh_proj(torch.cat((first.enorm(embedded), first.hnorm(hidden)), dim=-1))
        return last.final_layernorm(last(first(value, attention_mask=mask)))

    def published(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for key, tensor in self.state_dict().items():
            folder, experts, name = key.partition(".experts.")
            each = enumerate(tensor) if experts else []
            found |= {f"{folder}.experts.{index}.{name}.weight": one.clone() for index, one in each} or {key: tensor}
        return found

    def load(self, published: dict[str, torch.Tensor]) -> None:
        stacks = {key: [published[name] for name in names] for key, names in self._stacks(published).items()}
        alone = {key: tensor for key, tensor in published.items() if ".experts." not in key}
        self.load_state_dict(alone | {key: torch.stack(tensors) for key, tensors in stacks.items()})

    def _stacks(self, published: dict[str, torch.Tensor]) -> dict[str, list[str]]:
        count = self.layers[1].mixer.gate.weight.shape[0]
        names = [key for key in self.state_dict() if ".experts." in key]
        return {
            key: [f"{key.replace('.experts.', f'.experts.{index}.')}.weight" for index in range(count)] for key in names
        }


@dataclass(frozen=True)
class MtpHead:
    """A head with the tables of its base, as `make_drafts.expected_values` takes one."""

    parts: Qwen | Nemotron
    embedding: torch.Tensor
    output_head: torch.Tensor
    generation: str = "mtp"

    def fused(self, features: torch.Tensor) -> torch.Tensor:
        """The base's features as `run` takes them: as they are."""
        return features

    def run(self, hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, V] and what each row feeds to the next step [T, H], rows at positions 0..T-1."""
        mask = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min).triu(1)[None, None]
        normed = self.parts(self.embedding[tokens][None], hidden[None], mask)[0]
        return normed @ self.output_head.T, normed


@torch.no_grad()
def make_head(name: str, directory: Path) -> None:
    """Write the tensors of one head and what is computed with them."""
    seed = 1900 + BASES.index(name)
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(_DECODERS / name, dtype=torch.float32, attn_implementation="eager")
    base_config = AutoConfig.from_pretrained(_DECODERS / name)
    config, dtype = base_config.get_text_config(), base_config.dtype
    config._attn_implementation = "eager"
    parts = (Nemotron if config.model_type == "nemotron_h" else Qwen)(config)
    published = {f"mtp.{key}": tensor.to(dtype).contiguous() for key, tensor in parts.published().items()}
    save_file(published, directory / "mtp.safetensors")
    draw_tensors(directory / "mtp.safetensors", seed, 0.25)
    with whole(directory) as complete:
        drawn = load_file(complete / "mtp.safetensors")
    parts.load({key.removeprefix("mtp."): tensor.float() for key, tensor in drawn.items()})

    token_ids = torch.randint(0, config.vocab_size, (TOKENS,))
    embedding, output_head = base.get_input_embeddings().weight, base.get_output_embeddings().weight
    output = base(token_ids[None], output_hidden_states=True)
    features = output.hidden_states[-1][0]
    torch.testing.assert_close(features @ output_head.T, output.logits[0])  # it is the one behind the final norm
    head = MtpHead(parts, embedding, output_head)
    expected = expected_values(head, token_ids, features[None], (1,))
    expected |= {"token_ids": token_ids, "features": features.contiguous()} | chain_of(head, token_ids, features)
    stored = with_shares(expected, "logits|hidden_states")
    save_file(stored, directory / "expected.safetensors", metadata={**VERSIONS, "base": name})
    logits = expected["prefill_logits"]
    print(f"{name}: largest logit {logits.abs().max():.2f}, standard deviation {logits.std():.2f}")


def chain_of(head: MtpHead, token_ids: torch.Tensor, features: torch.Tensor) -> dict[str, torch.Tensor]:
    """The likeliest tokens one after another behind a text, each found with the hidden state of the one before."""
    hidden, tokens, rows = features[:-1], token_ids[1:], []
    logits, normed = head.run(hidden, tokens)
    for _ in range(CHAIN):
        chosen = logits[-1].argmax()[None]
        hidden, tokens = torch.cat((hidden, normed[-1:])), torch.cat((tokens, chosen))
        logits, normed = head.run(hidden, tokens)
        rows.append((chosen, logits[-1], normed[-1]))
    chosen, last, states = zip(*rows, strict=True)
    return {
        "chain_tokens": torch.cat(chosen),
        "chain_logits": torch.stack(last),
        "chain_hidden_states": torch.stack(states),
    }


if __name__ == "__main__":
    write_folders(__doc__, {name: partial(make_head, name) for name in BASES})
