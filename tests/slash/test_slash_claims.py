"""The claims on slash heads: verdicts at their criteria."""

import pytest
from declared import result_of

from tl_posgen.slash.claims import training


@pytest.mark.parametrize(
    ("formed", "unseen", "verdict"), [(3, 0.9, "held"), (3, 0.5, "held"), (3, 0.4, "partly"), (2, 0.9, "not held")]
)
def test_the_toy_has_to_form_its_head_in_every_seed_and_on_unseen_features(formed, unseen, verdict):
    scores = {"score_trained_mean": 0.95, "score_unseen_mean": unseen, "score_at_start": 0.02, "uniform": 0.03}
    own = {"seeds": 3, "distance": 3, "formed": formed, "r1_q_end_mean": 0.9, "r1_k_end_mean": 0.8, **scores}
    judged = training(result_of(own))
    assert judged.verdict == verdict
    assert f"{unseen:.2f} on unseen ones" in judged.measured
    assert judged.null.startswith("before training 0.020")
