"""Both models written again from the specification, one token at a time, in plain loops.

`PlainModel` takes from the package only the weights and the numbers of the configuration.
Its state is Python lists of tokens and slots; a test that compares with it has an answer that
no buffer, mask, chunk or kernel has touched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from anchormass import TransformerLM


@dataclass
class Slot:
    """Key and value `[Hg, D]`, the mass, and the positions of the tokens it stands for."""

    k: Tensor
    v: Tensor
    mass: float
    holds: list[int]

    def energy(self) -> float:
        heads = [float(head.norm()) for head in self.v]
        return sum(heads) / len(heads) * math.log(1 + self.mass)


@dataclass
class LayerState:
    raw: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # k, v [H, D] of every token
    slots: list[Slot] = field(default_factory=list)
    dropped: float = 0.0


class PlainModel:
    """One row. `absorb` is one prefill chunk, or with one id a decode step."""

    def __init__(self, model: TransformerLM, session_length: int, **settings: object) -> None:
        self.config = model.config.replace(**settings)
        self.weights = {name: p.detach().double() for name, p in model.named_parameters()}
        self.layers = [LayerState() for _ in range(self.config.n_layers)]
        self.session_length = session_length

    # ------------------------------------------------------------ a transformer

    def absorb(self, ids: list[int]) -> Tensor:
        """Logits `[len(ids), V]`. Stage 2 runs once, at the end."""
        logits = torch.stack([self.token(i) for i in ids])
        for layer in self.layers:
            self.stage_2(layer)
        return logits

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = math.sqrt(float(x.square().mean()) + self.config.norm_eps)
        return x / scale * self.weights[f"{name}.weight"]

    def token(self, token_id: int) -> Tensor:
        x = self.weights["embed_tokens.weight"][token_id]
        heads = self.config.n_heads
        for i, state in enumerate(self.layers):
            name = f"layers.{i}"
            h = self.norm(x, f"{name}.input_layernorm")
            q, k, v = (
                (self.weights[f"{name}.self_attn.{part}_proj.weight"] @ h).view(heads, -1)
                for part in "qkv"
            )
            position = len(state.raw)
            state.raw.append((self.rotate(k, position), v))
            found = self.attend(state, self.rotate(q, position), position)
            x = x + self.weights[f"{name}.self_attn.o_proj.weight"] @ found.flatten()
            h = self.norm(x, f"{name}.post_attention_layernorm")
            gate = self.weights[f"{name}.mlp.gate_proj.weight"] @ h
            up = self.weights[f"{name}.mlp.up_proj.weight"] @ h
            x = x + self.weights[f"{name}.mlp.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)
            self.stage_1(state)
        return self.weights["lm_head.weight"] @ self.norm(x, "norm")

    def rotate(self, x: Tensor, position: int) -> Tensor:
        """Dynamic NTK; feature i turns with feature i + D/2."""
        dim = x.shape[1]
        base = self.config.rope_theta
        if self.session_length > self.config.rope_context:
            base *= (self.session_length / self.config.rope_context) ** (dim / (dim - 2))
        out = x.clone()
        for i in range(dim // 2):
            angle = position / base ** (2 * i / dim)
            a, b = x[:, i], x[:, i + dim // 2]
            out[:, i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    # ------------------------------------------------------------ who sees what

    def attend(self, state: LayerState, q: Tensor, t: int) -> Tensor:
        c = self.config
        if c.attention == "standard":
            return torch.stack([softmax(q[h], state.raw, h) for h in range(c.n_heads)])
        out = []
        for h in range(c.n_heads):
            if h < c.n_local:
                out.append(softmax(q[h], state.raw[max(0, t - c.block + 1) :], h))
                continue
            seen = state.raw[: c.sinks]
            if t >= c.sinks:
                open_block = c.sinks + (t - c.sinks) // c.block * c.block
                seen = seen + state.raw[open_block:]
            slots = [s for s in state.slots if s.mass > 0]
            out.append(softmax(q[h], seen, h, slots, h - c.n_local))
        return torch.stack(out)

    # ------------------------------------------------------------ stage 1

    def stage_1(self, state: LayerState) -> None:
        c = self.config
        body = len(state.raw) - c.sinks
        if c.attention == "standard" or body <= 0 or body % c.block:
            return
        for start in range(len(state.raw) - c.block, len(state.raw), c.subgroup):
            members = list(range(start, start + c.subgroup))
            k = [state.raw[i][0][c.n_local :] for i in members]
            v = [state.raw[i][1][c.n_local :] for i in members]
            mean = sum(v) / len(v)
            norms = torch.stack([x.norm(dim=-1) for x in v])  # [8, Hg]
            similarity = [
                float(((x * mean).sum(-1) / (x.norm(dim=-1) * mean.norm(dim=-1))).mean()) for x in v
            ]
            relative = (norms / norms.mean(0)).mean(1)
            odd = min(range(len(v)), key=lambda i: similarity[i])
            background = list(range(len(v)))
            if similarity[odd] < c.cos_threshold or float(relative.max()) > c.norm_threshold:
                background.remove(odd)
                state.slots.append(Slot(k[odd], v[odd], 1.0, [members[odd]]))
            elif not c.compact:
                state.slots.append(Slot(torch.zeros_like(k[0]), torch.zeros_like(v[0]), 0.0, []))
            state.slots.append(
                Slot(
                    k[background[-1]],
                    sum(v[i] for i in background) / len(background),
                    float(len(background)),
                    [members[i] for i in background],
                )
            )

    # ------------------------------------------------------------ stage 2

    def stage_2(self, state: LayerState) -> None:
        c = self.config
        while len(state.slots) > c.max_slots:
            slots, excess = state.slots, len(state.slots) - c.max_slots
            n = len(slots)
            if c.policy in ("fifo", "priority"):
                gone = range(excess)
                if c.policy == "priority":
                    order = sorted(range(n - c.n_recent), key=lambda i: (slots[i].energy(), i))
                    gone = order[:excess]
                state.dropped += sum(slots[i].mass for i in gone)
                state.slots = [s for i, s in enumerate(slots) if i not in set(gone)]
                continue
            pairs = (n - (c.n_recent if c.policy == "adaptive" else 0)) // 2
            count = min(excess, pairs)
            energy = [slots[2 * p].energy() + slots[2 * p + 1].energy() for p in range(pairs)]
            chosen = sorted(range(pairs), key=lambda p: (energy[p], p))[:count]
            if c.policy == "uniform_merge":  # the pairs at the centres of `count` equal spans
                chosen = [math.floor((i + Fraction(1, 2)) * pairs / count) for i in range(count)]
            merged = []
            for i, slot in enumerate(slots):
                if i // 2 not in chosen:
                    merged.append(slot)
                elif i % 2 == 0:
                    merged.append(merge(slot, slots[i + 1], c.policy == "uniform_merge"))
            state.slots = merged


def merge(a: Slot, b: Slot, by_mass: bool) -> Slot:
    if a.mass == 0 or b.mass == 0:
        return b if a.mass == 0 else a
    wa, wb = (a.mass, b.mass) if by_mass else (a.energy(), b.energy())
    k = b.k if b.energy() >= a.energy() else a.k
    return Slot(k, (wa * a.v + wb * b.v) / (wa + wb), a.mass + b.mass, a.holds + b.holds)


def softmax(
    q: Tensor,
    raw: list[tuple[Tensor, Tensor]],
    head: int,
    slots: list[Slot] | None = None,
    slot_head: int = 0,
) -> Tensor:
    """One query over raw tokens and slots: weights exp(q·k/√d + log n), normalised."""
    slots = slots or []
    keys = [k[head] for k, _ in raw] + [s.k[slot_head] for s in slots]
    values = [v[head] for _, v in raw] + [s.v[slot_head] for s in slots]
    masses = [1.0] * len(raw) + [s.mass for s in slots]
    logits = torch.stack(keys) @ q / math.sqrt(len(q))
    weights = (logits - logits.max()).exp() * torch.tensor(masses, dtype=torch.float64)
    return weights @ torch.stack(values) / weights.sum()
