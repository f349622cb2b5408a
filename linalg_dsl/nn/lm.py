"""A small decoder with a layer pattern, for experiments: recurrences, softmax attention, and hybrids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linalg_dsl.errors import ArgumentError
from linalg_dsl.nn.attention import Attention
from linalg_dsl.nn.cache import Cache
from linalg_dsl.nn.mixer import Mixer
from linalg_dsl.nn.packing import Packing
from linalg_dsl.nn.pattern import LayerChoice, parse_pattern
from linalg_dsl.nn.sampling import pick

IGNORED = -100
"""A target that is not counted."""
_CONFIG, _WEIGHTS = "config.json", "model.pt"


@dataclass
class LMOutput:
    """``logits`` [B, T, vocabulary], ``past_key_values`` a ``Cache`` or None, ``loss`` a scalar or None."""

    logits: Tensor
    past_key_values: Cache | None = None
    loss: Tensor | None = None


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) * W_up x)."""

    def __init__(self, size: int, inner: int, **made: Any) -> None:
        super().__init__()
        self.gate_up = nn.Linear(size, 2 * inner, bias=False, **made)
        self.down = nn.Linear(inner, size, bias=False, **made)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return cast(Tensor, self.down(F.silu(gate) * up))


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); no second half where ``inner`` is 0."""

    def __init__(self, mixer: nn.Module, size: int, inner: int, eps: float, **made: Any) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(size, eps, **made), mixer
        self.mlp_norm = nn.RMSNorm(size, eps, **made) if inner else None
        self.mlp = SwiGLU(size, inner, **made) if inner else None

    def residual_weights(self) -> list[Tensor]:
        """Those of the projections whose results are added to x."""
        found = [cast(nn.Linear, self.mixer.out).weight]
        return found if self.mlp is None else [*found, self.mlp.down.weight]

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        return_state: bool = False,
        packing: Packing | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor, Any]:
        given = {"return_state": return_state, "packing": packing, "in_place": in_place}
        found = self.mixer(self.norm(x), state, **given)
        y, after = found if return_state else (found, None)
        x = x + y
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x, after


class LM(nn.Module):
    """Embedding, one block per layer of ``pattern``, a norm, logits.

    ``pattern`` says which layer stands where (``linalg_dsl.nn.pattern``): ``"delta*3 full"`` with 12
    ``num_layers`` is three delta-rule layers and one of full attention, three times. ``layers`` gives names
    of the pattern a spec each. ``num_heads``, ``head_dim`` (K), ``value_dim`` (V) and ``conv_size`` hold for
    every layer whose item in the pattern does not say otherwise; attention layers have
    ``attention_conv_size``. ``mixers`` are further arguments of ``Mixer`` by layer name, such as
    ``{"gdn": {"output_gate": False}}``. ``mlp_ratio`` times hidden_size is the inner size of the SwiGLU
    blocks, 0 leaves them out. Linear and embedding weights are normal with ``init_std``, those of projections
    into the residual stream with ``residual_std``: None is ``init_std``, at 0 every block begins as the
    identity (Zhang et al. 2019, arXiv 1901.09321). Raises ``ArgumentError`` for a wrong pattern or sizes that
    do not fit.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        pattern: str | Sequence[LayerChoice],
        *,
        num_layers: int | None = None,
        num_heads: int = 4,
        head_dim: int | None = None,
        value_dim: int | None = None,
        layers: Mapping[str, Any] | None = None,
        mixers: Mapping[str, Mapping[str, Any]] | None = None,
        mlp_ratio: float = 8 / 3,
        conv_size: int = 4,
        attention_conv_size: int = 0,
        rotary: bool = True,
        tie_embeddings: bool = True,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        residual_std: float | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(pattern, str):
            self.choices = parse_pattern(pattern, num_layers, layers)
        else:
            self.choices = tuple(pattern)
        if vocab_size < 1 or hidden_size < 1:
            raise ArgumentError(
                f"LM: vocab_size {vocab_size} and hidden_size {hidden_size} must be at least 1"
            )
        names = {c.name for c in self.choices}
        if unknown := [n for n in mixers or {} if n not in names]:
            raise ArgumentError(
                f"LM: mixers names {unknown[0]!r}; the pattern has {', '.join(sorted(names))}"
            )
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self._saved: dict[str, Any] = {
            "vocab_size": vocab_size, "hidden_size": hidden_size, "num_heads": num_heads,
            "head_dim": head_dim, "value_dim": value_dim, "mlp_ratio": mlp_ratio, "conv_size": conv_size,
            "rotary": rotary, "attention_conv_size": attention_conv_size, "tie_embeddings": tie_embeddings,
            "norm_eps": norm_eps, "init_std": init_std, "residual_std": residual_std,
        }  # fmt: skip
        self._mixers = {n: dict(x) for n, x in (mixers or {}).items()}
        inner = round(mlp_ratio * hidden_size)
        self.embed = nn.Embedding(vocab_size, hidden_size, **made)
        self.layers = nn.ModuleList()
        for choice in self.choices:
            layer = self._layer(choice, backend, made)
            self.layers.append(Block(layer, hidden_size, inner, norm_eps, **made))
        self.norm = nn.RMSNorm(hidden_size, norm_eps, **made)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False, **made)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, 0, init_std)
        if residual_std is not None:
            for block in self.layers:
                for weight in cast(Block, block).residual_weights():
                    nn.init.normal_(weight, 0, residual_std)
        if tie_embeddings:
            self.head.weight = self.embed.weight

    def _layer(self, choice: LayerChoice, backend: str, made: Mapping[str, Any]) -> nn.Module:
        own: dict[str, Any] = dict(choice.options)
        saved = self._saved
        heads = int(own.pop("heads", saved["num_heads"]))
        head_dim = _whole(own.pop("head_dim", saved["head_dim"]))
        if choice.spec is None:
            conv = int(own.pop("conv", saved["attention_conv_size"]))
            return Attention(
                self.hidden_size, heads, window=choice.window, num_kv_heads=_whole(own.pop("kv_heads", None)),
                head_dim=head_dim, rotary=bool(saved["rotary"]), conv_size=conv, **made,
            )  # fmt: skip
        further = {"conv_size": int(own.pop("conv", saved["conv_size"])), **self._mixers.get(choice.name, {})}
        value_dim = _whole(own.pop("value_dim", saved["value_dim"]))
        return Mixer(
            choice.spec, self.hidden_size, heads, head_dim=head_dim, value_dim=value_dim,
            backend=backend, **{"consts": own, **further}, **made,
        )  # fmt: skip

    # -- the call -------------------------------------------------------------------------------
    def forward(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        targets: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        last_only: bool = False,
        at: Tensor | None = None,
        in_place: bool = False,
    ) -> LMOutput:
        """``input_ids`` [B, T] to logits [B, T, vocabulary], those of what comes after each token.

        ``past_key_values`` is the cache of an earlier call, and ``use_cache`` asks for one. ``targets``
        [B, T] holds what the logits at a place should say (not shifted; -100 is not counted) and gives the
        mean ``loss``. ``cu_seqlens`` [N + 1] packs sequences into a batch of one. ``last_only``: logits
        [N, 1, vocabulary] of the last tokens; ``at`` [n], int64: logits [B, n, vocabulary] at these places,
        with targets [B, n]. ``in_place``: the states in ``past_key_values`` may be
        overwritten; without gradients that spares copies while generating.
        """
        if input_ids.dim() != 2:
            raise ArgumentError(f"LM: input_ids must be [B, T], got shape {tuple(input_ids.shape)}")
        if past_key_values is not None and len(past_key_values) != len(self.layers):
            raise ArgumentError(f"LM: a cache of {len(past_key_values)} layers for {len(self.layers)}")
        packing = None
        if cu_seqlens is not None:
            packing = Packing.of(cu_seqlens, input_ids.shape[1], cu_seqlens_cpu)
        x = self.embed(input_ids)
        after = []
        for i, block in enumerate(self.layers):
            state = None if past_key_values is None else past_key_values[i]
            x, own = block(x, state, use_cache, packing, in_place)
            after.append(own)
        if last_only:
            x = x[:, -1:] if packing is None else packing.last(x)[:, None]
        elif at is not None:
            x = x.index_select(1, at)
        if targets is not None and targets.shape != x.shape[:2]:
            raise ArgumentError(
                f"LM: targets must be {list(x.shape[:2])}, one for each of the logits, got shape "
                f"{tuple(targets.shape)}"
            )
        logits = self.head(self.norm(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        cache = None
        if use_cache:
            before = past_key_values.seen if past_key_values is not None else 0
            cache = Cache(tuple(after), before + (packing.longest if packing else input_ids.shape[1]))
        return LMOutput(logits, cache, loss)

    @torch.no_grad()
    def generate(
        self,
        prompts: Tensor | Sequence[Tensor],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Prompts [B, T], or a list of them [T_i] of any lengths from 1, with up to ``max_new_tokens`` more.

        Temperature 0 takes the likeliest token, else tokens are drawn, of the ``top_k`` likeliest or those
        that together have probability ``top_p``. What follows ``eos_token_id`` is that token again. Gives
        [B, T + new], or a list.
        """
        if isinstance(prompts, Tensor):
            out = self(prompts, use_cache=True, last_only=True)
        else:
            if not prompts or any(p.dim() != 1 or p.shape[0] == 0 for p in prompts):
                raise ArgumentError(
                    "LM.generate: prompts are a tensor [B, T] or a list of tensors [T] with T >= 1"
                )
            lengths = torch.tensor([0, *(p.shape[0] for p in prompts)])
            offsets = lengths.cumsum(0)
            packed = torch.cat(list(prompts))[None]
            out = self(
                packed,
                use_cache=True,
                last_only=True,
                cu_seqlens=offsets.to(packed.device),
                cu_seqlens_cpu=offsets,
            )
        made: list[Tensor] = []
        done = torch.zeros(out.logits.shape[0], dtype=torch.bool, device=out.logits.device)
        for i in range(max_new_tokens):
            token = pick(out.logits[:, -1], temperature, top_k, top_p, generator)
            if eos_token_id is not None:
                token = token.masked_fill(done, eos_token_id)
                done |= token == eos_token_id
            made.append(token)
            if i + 1 == max_new_tokens or (eos_token_id is not None and bool(done.all())):
                break
            out = self(token[:, None], out.past_key_values, use_cache=True, in_place=True)
        if not made:
            return prompts
        new = torch.stack(made, dim=1)
        if isinstance(prompts, Tensor):
            return torch.cat([prompts, new], dim=1)
        return [torch.cat([p, n]) for p, n in zip(prompts, new, strict=True)]

    # -- files ----------------------------------------------------------------------------------
    def save(self, folder: str | Path) -> Path:
        """Writes config.json, with the texts of all specs, and model.pt; ``LM.load`` needs nothing else.

        Raises ``ArgumentError`` where inputs of a layer were replaced by modules: they are code.
        """
        if any("inputs" in x for x in self._mixers.values()):
            raise ArgumentError("LM.save: layers with replaced inputs cannot be written; save the state_dict")
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        layers = [
            {
                "name": c.name,
                "spec": str(c.spec) if c.spec else None,
                "window": c.window,
                "options": dict(c.options),
            }
            for c in self.choices
        ]
        config = {**self._saved, "layers": layers, "mixers": self._mixers}
        (target / _CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
        torch.save(self.state_dict(), target / _WEIGHTS)
        return target

    @classmethod
    def load(
        cls, folder: str | Path, *, backend: str = "auto", device: torch.device | str | None = None
    ) -> LM:
        """The model that ``save`` wrote."""
        from linalg_dsl.language.parser import parse

        config = json.loads((Path(folder) / _CONFIG).read_text(encoding="utf-8"))
        choices = [
            LayerChoice(
                x["name"],
                parse(x["spec"]) if x["spec"] else None,
                x["window"],
                tuple(sorted(x["options"].items())),
            )
            for x in config.pop("layers")
        ]
        weights = torch.load(Path(folder) / _WEIGHTS, map_location=device or "cpu", weights_only=True)
        model = cls(pattern=choices, backend=backend, device="meta", **config)
        model.load_state_dict(weights, assign=True)
        if config["tie_embeddings"]:
            model.head.weight = model.embed.weight
        return model

    def extra_repr(self) -> str:
        return " ".join(str(c) for c in self.choices)


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
