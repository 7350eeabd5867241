"""Model configurations: one frozen dataclass, and the presets by name.

Both models of the study share every shape; only `attention` differs. Symbols follow the
article: C = `block`, M_max = `max_slots`, L0 = `rope_context`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from anchormass.errors import AnchorMassError
from anchormass.policies import get_policy

ATTENTIONS = ("standard", "anchormass")
_COUNTS = (
    "vocab_size",
    "n_layers",
    "width",
    "ffn_width",
    "n_heads",
    "rope_context",
    "block",
    "subgroup",
    "sinks",
    "max_slots",
)


@dataclass(frozen=True)
class Config:
    """Shapes and constants of one model. Refuses values that cannot work.

    Attributes:
        attention: `"standard"` (full causal) or `"anchormass"` (Local and Global heads).
        vocab_size: rows of the input and output embeddings (untied).
        n_layers: transformer layers.
        width: hidden size; `width / n_heads` is the head size D.
        ffn_width: inner size of the SwiGLU feed-forward part.
        n_heads: attention heads H. Half of them are Local unless `local_heads` says otherwise.
        rope_theta: base of the rotary frequencies.
        rope_context: L0, the session length in tokens beyond which the base is stretched.
        norm_eps: epsilon of RMSNorm.
        local_heads: how many heads are Local, the first ones. Default: the first half.
        block: C, tokens per block and width of the Local window.
        subgroup: tokens per subgroup of stage 1.
        sinks: first positions kept raw for ever.
        cos_threshold, norm_threshold: stage 1 fires below the first or above the second.
        max_slots: M_max, most slots of the compressed stream (sinks and tail not counted).
        recent_slots: newest slots that `adaptive` and `priority` protect. Default: M_max / 4.
        policy: stage-2 policy by name (see `anchormass.policies()`).
        compact: store no empty outlier slots (ours; the article allocates them).
    """

    attention: str
    vocab_size: int
    n_layers: int
    width: int
    ffn_width: int
    n_heads: int
    rope_theta: float = 10_000.0
    rope_context: int = 4096
    norm_eps: float = 1e-6
    local_heads: int | None = None
    block: int = 64
    subgroup: int = 8
    sinks: int = 16
    cos_threshold: float = 0.85
    norm_threshold: float = 2.0
    max_slots: int = 8192
    recent_slots: int | None = None
    policy: str = "adaptive"
    compact: bool = False

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise AnchorMassError(f"attention={self.attention!r}: choose one of {ATTENTIONS}")
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise AnchorMassError(f"{name}={value!r}: must be a whole number of at least 1")
        for name in ("local_heads", "recent_slots"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 0):
                raise AnchorMassError(f"{name}={value!r}: must be a whole number or None")
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise AnchorMassError(f"{name}={getattr(self, name)}: must be a positive number")
        for name in ("cos_threshold", "norm_threshold"):
            if getattr(self, name) != getattr(self, name):
                raise AnchorMassError(f"{name}=nan: must be a number")
        get_policy(self.policy)
        if self.width % self.n_heads or (self.width // self.n_heads) % 2:
            raise AnchorMassError(
                f"width={self.width} over n_heads={self.n_heads}: the head size must be a whole "
                "even number"
            )
        if self.head_dim <= 2:
            raise AnchorMassError(f"head size {self.head_dim}: Dynamic NTK RoPE needs at least 4")
        if self.block % self.subgroup or self.subgroup < 2:
            raise AnchorMassError(
                f"block={self.block}, subgroup={self.subgroup}: a block must be a whole number of "
                "subgroups of at least 2 tokens"
            )
        if self.attention == "anchormass":
            self._check_anchormass()
        else:  # nothing to split or protect: two equal Standard models compare equal
            object.__setattr__(self, "local_heads", None)
            object.__setattr__(self, "recent_slots", None)

    def _check_anchormass(self) -> None:
        if self.local_heads is None:
            if self.n_heads % 2:
                raise AnchorMassError(
                    f"n_heads={self.n_heads} cannot be halved into Local and Global heads; use an "
                    "even number or set local_heads"
                )
            object.__setattr__(self, "local_heads", self.n_heads // 2)
        if not 1 <= self.n_local < self.n_heads:
            raise AnchorMassError(
                f"local_heads={self.local_heads}: must leave at least one Local and one Global "
                f"head of {self.n_heads}"
            )
        if self.recent_slots is None:
            object.__setattr__(self, "recent_slots", self.max_slots // 4)
        if not 0 <= self.n_recent < self.max_slots:
            raise AnchorMassError(
                f"max_slots={self.max_slots} is not more than the {self.recent_slots} protected "
                "recent slots; raise max_slots or lower recent_slots"
            )

    @property
    def head_dim(self) -> int:
        """D, features per head."""
        return self.width // self.n_heads

    @property
    def n_local(self) -> int:
        """Local heads (0 for Standard)."""
        return self.local_heads or 0

    @property
    def n_global(self) -> int:
        """Global heads (0 for Standard)."""
        return self.n_heads - self.n_local if self.attention == "anchormass" else 0

    @property
    def n_recent(self) -> int:
        """Newest slots that a protecting policy leaves alone."""
        return self.recent_slots or 0

    @property
    def slots_per_block(self) -> int:
        """Slots that stage 1 makes of one block: an outlier and a background per subgroup."""
        return 2 * self.block // self.subgroup

    def replace(self, **changes: Any) -> Config:
        """A copy with some fields changed; derived defaults follow what they derive from."""
        for source, derived in (("n_heads", "local_heads"), ("max_slots", "recent_slots")):
            if source in changes and getattr(self, derived) == self._default(derived):
                changes.setdefault(derived, None)
        unknown = sorted(set(changes) - {f.name for f in dataclasses.fields(self)})
        if unknown:
            raise AnchorMassError(f"Config has no field {', '.join(unknown)}")
        return dataclasses.replace(self, **changes)

    def _default(self, derived: str) -> int:
        return self.n_heads // 2 if derived == "local_heads" else self.max_slots // 4

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for files."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The inverse of `to_dict`. Raises AnchorMassError for unknown or missing fields."""
        try:
            return cls(**values)
        except TypeError as error:
            raise AnchorMassError(f"not a configuration of this version: {error}") from None


_SHAPES: dict[str, dict[str, Any]] = {
    # The article's model.
    "150m": dict(vocab_size=28_000, n_layers=14, width=768, ffn_width=2560, n_heads=12),
    # An eighth of the article's lengths (stages of 512, 1K and up to 4K tokens) and of its
    # budget, so that here too the budget fills at the training limit.
    "mini": dict(
        vocab_size=4096,
        n_layers=4,
        width=192,
        ffn_width=512,
        n_heads=6,
        rope_context=512,
        max_slots=1024,
    ),
    # Runs everything in a moment; its block and budget are small so that short texts fill it.
    "smoke": dict(
        vocab_size=4096,
        n_layers=2,
        width=16,
        ffn_width=32,
        n_heads=2,
        rope_context=512,
        max_slots=64,
    ),
}


def presets() -> list[str]:
    """Names that `preset` knows."""
    return [f"{attention}-{shape}" for attention in ATTENTIONS for shape in _SHAPES]


def preset(name: str) -> Config:
    """The configuration called `name`, e.g. `"anchormass-150m"` or `"standard-mini"`.

    Raises:
        AnchorMassError: for a name that is not in `presets()`.
    """
    attention, _, shape = name.partition("-")
    if attention not in ATTENTIONS or shape not in _SHAPES:
        raise AnchorMassError(f"unknown preset {name!r}: choose one of {', '.join(presets())}")
    return Config(attention=attention, **_SHAPES[shape])
