"""Configurations: the article's shapes, what follows from what, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from anchormass import AnchorMassError, Config, preset
from anchormass.config import presets

BASE: dict[str, Any] = dict(
    attention="anchormass", vocab_size=100, n_layers=2, width=48, ffn_width=64, n_heads=6
)


def parameters(config: Config) -> int:
    """Counted from the shapes alone: embeddings, projections, feed-forward, norms."""
    layer = 4 * config.width**2 + 3 * config.width * config.ffn_width + 2 * config.width
    return 2 * config.vocab_size * config.width + config.n_layers * layer + config.width


@pytest.mark.parametrize("attention", ["standard", "anchormass"])
def test_the_articles_model(attention: str) -> None:
    config = preset(f"{attention}-150m")
    assert config.attention == attention
    assert (config.vocab_size, config.n_layers, config.width) == (28_000, 14, 768)
    assert (config.ffn_width, config.n_heads, config.head_dim) == (2560, 12, 64)
    assert (config.rope_theta, config.rope_context) == (10_000.0, 4096)
    assert parameters(config) == 158_635_776


def test_the_articles_constants() -> None:
    config = preset("anchormass-150m")
    assert (config.n_local, config.n_global) == (6, 6)
    assert (config.block, config.subgroup, config.sinks) == (64, 8, 16)
    assert (config.cos_threshold, config.norm_threshold) == (0.85, 2.0)
    assert (config.max_slots, config.n_recent, config.policy) == (8192, 2048, "adaptive")
    assert config.slots_per_block == 16
    assert not config.compact


def test_presets_come_in_pairs_that_differ_in_attention_alone() -> None:
    assert len(presets()) == len(set(presets())) >= 6
    for name in presets():
        attention, _, shape = name.partition("-")
        other = preset(
            {"standard": "anchormass", "anchormass": "standard"}[attention] + f"-{shape}"
        )
        mine = preset(name)
        assert mine.attention == attention
        for field in ("vocab_size", "n_layers", "width", "ffn_width", "n_heads", "rope_context"):
            assert getattr(mine, field) == getattr(other, field)


def test_the_small_presets_are_small() -> None:
    mini = preset("anchormass-mini")
    assert parameters(mini) <= 4_000_000
    assert mini.head_dim in (32, 64) and mini.max_slots == 1024
    # The budget fills at the training limit of 4K tokens, as in the article at 32K.
    assert 0.9 < (4096 - mini.sinks) // mini.block * mini.slots_per_block / mini.max_slots <= 1
    smoke = preset("anchormass-smoke")
    without_embeddings = parameters(smoke) - 2 * smoke.vocab_size * smoke.width
    assert without_embeddings < 10_000


def test_a_standard_model_has_no_local_or_global_heads() -> None:
    config = preset("standard-150m")
    assert (config.n_local, config.n_global) == (0, 0)


# ---------------------------------------------------------------- replace


def test_replace_carries_derived_defaults_along() -> None:
    config = Config(**BASE)
    assert (config.local_heads, config.recent_slots) == (3, 2048)
    assert config.replace(n_heads=8).local_heads == 4
    assert config.replace(max_slots=100).recent_slots == 25
    both = config.replace(n_heads=2, max_slots=8)
    assert (both.local_heads, both.recent_slots) == (1, 2)
    assert config.local_heads == 3  # the original is unchanged


def test_replace_keeps_what_was_chosen() -> None:
    config = Config(**BASE, local_heads=1, recent_slots=10)
    changed = config.replace(n_heads=8, max_slots=100)
    assert (changed.local_heads, changed.recent_slots) == (1, 10)
    explicit = Config(**BASE).replace(n_heads=8, local_heads=2, max_slots=100, recent_slots=7)
    assert (explicit.local_heads, explicit.recent_slots) == (2, 7)
    assert Config(**BASE).replace(policy="fifo", sinks=4).local_heads == 3


def test_replace_there_and_back_is_the_same_configuration() -> None:
    config = preset("anchormass-mini")
    assert config.replace(max_slots=64).replace(max_slots=1024) == config
    assert config.replace(n_heads=4).replace(n_heads=6) == config
    assert config.replace() == config


@pytest.mark.parametrize("shape", ["150m", "mini", "smoke"])
def test_replace_turns_one_model_into_the_other(shape: str) -> None:
    standard, anchormass = preset(f"standard-{shape}"), preset(f"anchormass-{shape}")
    assert standard.replace(attention="anchormass") == anchormass
    turned = anchormass.replace(attention="standard")
    assert (turned.n_local, turned.n_global) == (0, 0)
    assert turned == standard
    assert standard.replace(max_slots=32).replace(attention="anchormass").n_recent == 8


def test_replace_refuses_what_construction_refuses() -> None:
    config = preset("anchormass-smoke")
    with pytest.raises(AnchorMassError, match="no field heads, widht"):
        config.replace(widht=32, heads=2)
    with pytest.raises(AnchorMassError, match="n_heads=3"):
        config.replace(width=24, n_heads=3)
    with pytest.raises(AnchorMassError, match="max_slots=8 is not more than the 10"):
        config.replace(recent_slots=10, max_slots=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 32  # type: ignore[misc]


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("name", presets())
def test_a_configuration_survives_a_file(name: str) -> None:
    config = preset(name)
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_file_of_something_else_is_refused() -> None:
    good = preset("anchormass-smoke").to_dict()
    with pytest.raises(AnchorMassError, match="colour"):
        Config.from_dict({**good, "colour": "red"})
    with pytest.raises(AnchorMassError, match="width"):
        Config.from_dict({key: value for key, value in good.items() if key != "width"})
    with pytest.raises(AnchorMassError, match="'wide'"):
        Config.from_dict({**good, "width": "wide"})
    with pytest.raises(AnchorMassError, match="configuration"):
        Config.from_dict({**good, "rope_theta": "large"})
    with pytest.raises(AnchorMassError, match="'best'"):
        Config.from_dict({**good, "policy": "best"})


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "name", ["", "mini", "anchormass", "anchormass-", "anchormass-huge", "Standard-mini", "x-mini"]
)
def test_an_unknown_preset_is_refused(name: str) -> None:
    with pytest.raises(AnchorMassError) as refused:
        preset(name)
    assert repr(name) in str(refused.value) and "anchormass-mini" in str(refused.value)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"attention": "sparse"}, "attention='sparse'"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"n_layers": -1}, "n_layers=-1"),
        ({"width": 0}, "width=0"),
        ({"ffn_width": 0}, "ffn_width=0"),
        ({"n_heads": 0}, "n_heads=0"),
        ({"rope_context": 0}, "rope_context=0"),
        ({"block": 0}, "block=0"),
        ({"subgroup": 0}, "subgroup=0"),
        ({"sinks": 0}, "sinks=0"),
        ({"max_slots": 0}, "max_slots=0"),
        ({"width": 50}, "width=50 over n_heads=6"),
        ({"width": 54}, "width=54 over n_heads=6"),  # a head size of 9 cannot be rotated
        ({"width": 12}, "head size 2"),
        ({"block": 60}, "block=60, subgroup=8"),
        ({"subgroup": 1}, "subgroup=1"),
        ({"width": 40, "n_heads": 5}, "n_heads=5"),
        ({"local_heads": 0}, "local_heads=0"),
        ({"local_heads": 6}, "local_heads=6"),
        ({"local_heads": -1}, "local_heads=-1"),
        ({"max_slots": 16, "recent_slots": 16}, "max_slots=16 is not more than the 16"),
        ({"max_slots": 16, "recent_slots": 99}, "max_slots=16 is not more than the 99"),
        ({"recent_slots": -1}, "recent_slots=-1"),
        ({"recent_slots": 2.5}, "recent_slots=2.5"),
        ({"max_slots": 64.5}, "max_slots=64.5"),
        ({"vocab_size": "9"}, "vocab_size='9'"),
        ({"rope_theta": 0.0}, "rope_theta=0.0"),
        ({"rope_theta": float("nan")}, "rope_theta=nan"),
        ({"norm_eps": -1e-6}, "norm_eps=-1e-06"),
        ({"attention": "standard", "policy": "h2o"}, "'h2o'"),
        ({"policy": "h2o"}, "'h2o'"),
    ],
)
def test_a_value_that_cannot_work_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(AnchorMassError) as refused:
        Config(**{**BASE, **changes})
    assert named in str(refused.value)


def test_standard_takes_an_odd_number_of_heads() -> None:
    config = Config(**{**BASE, "attention": "standard", "width": 40, "n_heads": 5})
    assert config.head_dim == 8


def test_an_odd_number_of_heads_may_be_split_by_hand() -> None:
    config = Config(**{**BASE, "width": 40, "n_heads": 5}, local_heads=2)
    assert (config.n_local, config.n_global) == (2, 3)


def test_the_smallest_budget() -> None:
    config = Config(**BASE, max_slots=1)
    assert config.n_recent == 0
