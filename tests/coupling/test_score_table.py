"""Tables of models and scores: what is refused, with its line, and what does not matter."""

import pytest

from tl_posgen.coupling import coupling_scores
from tl_posgen.coupling.coupling_scores import score_table
from tl_posgen.errors import InputError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,points\na,1\n", "has no column score; it has model, points"),
        ("name,score\na,1\n", "has no column model"),
        ("model,score\na,1\n\nb,high\n", "line 4: score is 'high', not a finite number"),
        ("model,score\na,1\nb,\n", "line 3: score is '', not a finite number"),
        ("model,score\na,inf\n", "line 2: score is 'inf', not a finite number"),
        ("model,score\na,1\n ,2\n", "line 3: no model named"),
        ("model,score\na,1\na,2\n", "line 3: a is named a second time"),
        ("model,score,d_model\na,1,64\nb,1,-3\n", "line 3: d_model is '-3', not a positive number"),
        ("model,score\na,1,2,3\nb,1,2,3,4,5\n", "not a CSV table .*line 3"),
        ("model,score\na,1,2\nb,2,3\n", "rows have more cells than there are columns"),
        ("model,score\na\nb,2\n", "line 2: score is '', not a finite number"),
        ('model,score\n"a,1\n', "not a CSV table"),
        ("model,score\n", "has no row"),
        ("", "not a CSV table"),
    ],
)
def test_bad_score_files_are_refused_with_the_line_and_the_reason(tmp_path, text, message):
    path = tmp_path / "scores.csv"
    with pytest.raises(InputError, match=r"scores\.csv: no such file"):
        score_table(path)
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        coupling_scores(path, "once there was a cat")


def test_blank_lines_and_spaces_do_not_matter(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("model, score\n a , 0.5\n\nb,1\n\n")
    table = score_table(path)
    assert table["model"].tolist() == ["a", "b"]
    assert table["score"].tolist() == [0.5, 1]
