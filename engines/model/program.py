"""A model as a program: a short list of fused steps, which executors run.

A family's decoder, a draft head or a vision encoder is written once, as the steps of one engine shape (`steps.py`). A
step names the values that it reads and writes, its weights, and its parameters. `graph.py` runs a program by operations
(TensorRT, NumPy), `backends/steps` by hand-written kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from edgellm.engines.model.adapted_projections import SCALES, AdaptedProjection, adapted_projections
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.states import PRESENT, Edge, is_recurrent, kept_edge, state_edge
from edgellm.engines.model.steps import Attention, Experts, Stateful, Step, stateful
from edgellm.kernels.quantization.row_runs import PackedLayout


@dataclass(frozen=True)
class Program:
    """One engine: what it takes, its steps in their order, and what it gives out.

    `inputs` and `outputs` are those besides weights, states and adapters. With `wide_residual` the residual stream is
    in float32 whatever the compute dtype is. `packed` are those of its weights that kernels read packed, where that is
    known.
    """

    shape: EngineShape
    inputs: Edge
    steps: tuple[Step, ...]
    outputs: Edge
    wide_residual: bool = False
    packed: Mapping[str, PackedLayout] = field(default_factory=dict, repr=False)

    @cached_property
    def weights(self) -> dict[str, WeightSpec]:
        """The weights by name, in order of use."""
        return {spec.name: spec for step in self.steps for spec in step.weights}

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The steps that have KV rows."""
        return tuple(step for step in self.steps if isinstance(step, Attention))

    @cached_property
    def mixtures(self) -> tuple[Experts, ...]:
        """The mixtures of experts."""
        return tuple(step for step in self.steps if isinstance(step, Experts))

    @cached_property
    def stateful(self) -> tuple[Stateful, ...]:
        """The steps that have a state, KV rows or another."""
        return stateful(self.steps)

    @cached_property
    def kinds(self) -> Edge:
        """Shape and dtype of every value between the steps, where kernels run them; in a decoder those of one name are
        alike, of an encoder's the last counts."""
        return self._kinds_before(len(self.steps))

    def kinds_before(self, number: int) -> Edge:
        """The same of what a step takes, by its number."""
        return self._kinds_before(number) if self.shape.phase == "encode" else self.kinds

    def _kinds_before(self, number: int) -> Edge:
        kinds, differ = self.inputs | self.outputs, self.shape.phase == "encode"
        for step in self.steps[:number]:
            results = step.results(kinds, self.shape, "float32")
            if step.keeps is not None and step.kept_value is not None:
                results[step.keeps.target] = kinds[step.kept_value][0], "compute"
            for name, kind in results.items():
                kinds[name] = kind if differ and name not in self.outputs else kinds.get(name, kind)
            assert step.output in kinds, f"{step.title} does not say what it gives"
        return kinds

    @cached_property
    def states(self) -> Edge:
        """The tensors of the layers' states."""
        shape = self.shape
        return state_edge((step.state(shape) for step in self.stateful), shape.batch, shape.kv_rows)

    @cached_property
    def changed(self) -> Edge:
        """Those of `states` that the engine changes where they are: not what a later commit changes."""
        return {name: kind for name, kind in self.states.items() if not (self.kept and is_recurrent(name))}

    @cached_property
    def kept(self) -> Edge:
        """Those of `outputs` from which a later commit takes the accepted tokens into the states."""
        return kept_states(self.stateful, self.shape)

    @cached_property
    def adapted(self) -> dict[str, AdaptedProjection]:
        """The linear layers that LoRA adapters are applied to, by name; none in an engine without adapters."""
        if not self.shape.lora_slots:
            return {}
        return {each.name: each for each in adapted_projections(list(self.weights.values()))}

    @cached_property
    def matrices(self) -> dict[str, tuple[int, ...]]:
        """The shapes of weights and adapters by name."""
        shape, found = self.shape, {name: spec.shape for name, spec in self.weights.items()}
        for each in self.adapted.values():
            found |= dict(each.edge(shape.lora_slots, shape.lora_rank))
        return found

    @cached_property
    def values(self) -> Edge:
        """What changes from run to run: `inputs`, states, and how much of each adapter each sequence takes."""
        scales: Edge = {SCALES: ((self.shape.batch, self.shape.lora_slots), "compute")} if self.adapted else {}
        return self.inputs | self.states | scales

    @cached_property
    def edge(self) -> Edge:
        """Every tensor that an engine of this program is bound to."""
        matrices: Edge = {name: (size, "compute") for name, size in self.matrices.items()}
        matrices |= {name: (spec.shape, spec.dtype) for name, spec in self.weights.items()}
        present = {PRESENT + name: kind for name, kind in self.changed.items()}
        return self.values | matrices | present | self.outputs


def token_inputs(shape: EngineShape, hidden_size: int, rotary_columns: int) -> Edge:
    """What every engine of a language model reads: embeddings, rotary rows, mask, where its KV rows begin, and the
    rows that get logits where not all do."""
    batch, tokens = shape.batch, shape.tokens
    inputs: Edge = {
        "inputs_embeds": ((batch, tokens, hidden_size), "compute"),
        "rope_rotary_cos_sin": ((batch, tokens, rotary_columns), "compute"),
        "attention_mask": ((batch, 1, tokens, shape.key_range), "bool"),
        "kvcache_start_index": ((batch,), "int32"),
    }
    if shape.selected < tokens:
        inputs["last_token_ids"] = ((batch, shape.selected), "int32")
    return inputs


def state_inputs(shape: EngineShape) -> Edge:
    """What an engine reads whose layers have states other than KV rows.

    A chunk of a prompt takes the first `state_tokens` of its rows into the states, the rest is padding. Nodes of a tree
    that is verified have their `node_parents`, -1 where a node follows the last committed token.
    """
    if shape.phase == "prefill":
        return {"state_tokens": ((shape.batch,), "int32")}
    return {"node_parents": ((shape.batch, shape.tokens), "int32")} if shape.phase == "verify" else {}


def kept_states(steps: Iterable[Step], shape: EngineShape) -> Edge:
    """What an engine with such steps gives out for a later commit: nothing where it commits itself."""
    if shape.phase == "prefill":
        return {}
    states = (step.state(shape) for step in stateful(steps))
    return kept_edge(states, shape.batch, shape.tokens)


def single_weight(name: str, *shape: int) -> WeightSpec:
    """A buffer that the tensor of the same name fills."""
    return WeightSpec(name, shape, ((name, shape),))
