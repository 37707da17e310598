"""What a build made, and what it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from edgellm.engines.building.plans import PlanBytes
from edgellm.engines.directories.plan_files import Platform
from edgellm.engines.model.config import DecoderConfig, EngineLimits, EngineShape
from edgellm.engines.model.draft_config import DraftConfig
from edgellm.engines.model.vision import VisionConfig


@dataclass(frozen=True)
class BuiltPlan:
    """One plan: its size in bytes and the seconds that it took, 0.0 where a valid one was there already."""

    platform: Platform
    shape: EngineShape
    size: int
    seconds: float


@dataclass
class BuildReport:
    """What was built. Sizes in bytes, of all models and adapters together; `seconds` by stage (weights and plans side
    by side). `adapters` are the ranks of the LoRA adapters by name.

    `peak_host_bytes` is the largest resident memory of this process so far and of those that built plans, summed: an
    upper bound, as they share libraries. `notes` are what a user should know.
    """

    path: Path
    config: DecoderConfig
    dtype: str
    limits: EngineLimits
    draft: DraftConfig | None = None
    weight_bytes: int = 0
    published_bytes: int = 0
    weights: str = "copy"
    plans: list[BuiltPlan] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    peak_host_bytes: int = 0
    notes: list[str] = field(default_factory=list)
    workers_peak_bytes: int = 0
    adapters: dict[str, int] = field(default_factory=dict)
    vision: VisionConfig | None = None

    def add_plan(self, platform: Platform, plan: PlanBytes) -> None:
        """Note a plan that was built."""
        self.plans.append(BuiltPlan(platform, plan.shape, len(plan.data), plan.seconds))
        self.workers_peak_bytes = max(self.workers_peak_bytes, plan.workers_peak_bytes)
