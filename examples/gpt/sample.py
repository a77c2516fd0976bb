"""Text from the model, byte by byte."""

from __future__ import annotations

import torch

import mfsdp_fn as mf

from .model import GPT


@torch.no_grad()
def sample(model: GPT, state: mf.ShardState, prompt: str, length: int, *, temperature: float, seed: int) -> str:
    """Continue `prompt`. Every rank must call this: the weights of each unit are gathered as the model runs."""
    generator = torch.Generator().manual_seed(seed)
    device = state.spec.device
    ids = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(length):
        logits = mf.functional_call(model, state, (ids[:, -model.context :],))[0, -1]
        odds = torch.softmax(logits.float() / temperature, dim=-1).cpu()
        ids = torch.cat([ids, torch.multinomial(odds, 1, generator=generator).to(device)[None]], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")
