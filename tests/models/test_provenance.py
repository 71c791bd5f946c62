"""Fingerprints of weights."""

import hashlib
import math

import torch

from tl_posgen.models import provenance
from tl_posgen.models.provenance import fingerprint


def one_by_one(model) -> str:
    """The fingerprint as its definition says it, a transfer a number."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().flatten()
        some = flat[:: max(1, len(flat) // 4096)].double().numpy()
        parts = [part.double() for part in flat.split(provenance.PART)]
        total, norm = (
            sum(float(p.sum()) for p in parts),
            math.hypot(*(float(torch.linalg.vector_norm(p)) for p in parts)),
        )
        digest.update(f"{name} {tuple(weight.shape)} {total} {norm}".encode() + some.tobytes())
    return digest.hexdigest()[:16]


def test_a_fingerprint_takes_few_transfers_and_is_that_of_each_weight_alone(llama, monkeypatch):
    transfers, to_cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(provenance, "PART", 100)  # several parts
    expected = one_by_one(llama)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: transfers.append(len(x)) or to_cpu(x))
    assert fingerprint(llama) == expected
    assert len(transfers) == 1
