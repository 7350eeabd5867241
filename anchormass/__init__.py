"""anchormass: AnchorMass Attention, a transformer whose KV cache stays at a fixed size."""

from anchormass.cache import load_cache
from anchormass.compress import compress_subgroups
from anchormass.config import Config, preset, presets
from anchormass.errors import AnchorMassError
from anchormass.generate import generate
from anchormass.memory import memory_formula
from anchormass.model import TransformerLM
from anchormass.policies import policies, register

__version__ = "0.1.0"
__all__ = [
    "AnchorMassError",
    "Config",
    "TransformerLM",
    "compress_subgroups",
    "generate",
    "load_cache",
    "memory_formula",
    "policies",
    "preset",
    "presets",
    "register",
]
