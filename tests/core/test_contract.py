"""What every measure's result keeps to: its dataset, words, tables and pictures, files."""

import json
import re
from dataclasses import replace
from functools import cache
from html import unescape

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from made_up import grown
from plotly.io.json import to_json_plotly
from quick_options import KINDS, NAMES, OPTIONS

import tl_posgen
from tl_posgen.core.formatting import ENCODINGS, format_number
from tl_posgen.core.measure import HEAD, LABELS
from tl_posgen.errors import InputError
from tl_posgen.models.tokens import bundled_text
from tl_posgen.report.figures import MOST_NAMES, MOST_TICKS
from tl_posgen.report.head_figures import MOST_ROWS
from tl_posgen.report.tables import compact, labelled

CUT = {"length": 18, "n_prompts": 4, "nulls": 2, "progress": False}  # 18: places are no labels of numbers
ENGINE = {"init", "group"}  # dims that the engine makes
WITH_A_LABEL = re.compile(r"_(low|high|q|k|all|without_first_token|with_first_token|left_out|\d+)$")
NUMBER = ("value", "low", "high", "inits", "shuffled")  # of an entry of the summary, behind its name and labels
SHOWN = 12  # of these that are compared
ENCODING_NAMES = {*ENCODINGS, "rotary"}
NUMERAL = re.compile(r"\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def of_measure(small_model):
    """Name -> the result of that measure and two random inits, each measured once."""

    @cache
    def result(name):
        after = {kind.name: result(kind.name) for kind in KINDS[name].after}
        asked = [KINDS[one].with_options(OPTIONS.get(one, {})) for one in (*after, name)]
        return tl_posgen.analyze(small_model, bundled_text(), measures=asked, after=after, **CUT)[name]

    return result


LONGER = {"substitution", "band_ablation", "profiles", "perturbation"}
LONGER |= {"plane_perturbation", "token_coupling", "dummy_distance", "length_extrapolation", "sources"}
LONGER |= {"residual", "cone", "slash_planes", "planes", "rules", "plane_use", "plane_roles", "plane_cost"}
LONGER |= {"recall", "gap", "slash_biases", "bias_ablation"}
CASES = [pytest.param(name, marks=pytest.mark.longer) if name in LONGER else name for name in NAMES]


@pytest.fixture(scope="module", params=CASES)  # so that tests of one measure run one after the other
def result(request, of_measure):
    return of_measure(request.param)


@pytest.fixture(scope="module")
def loaded(of_measure, tmp_path_factory):
    """Name -> that result after saving and loading."""
    directory = tmp_path_factory.mktemp("saved")
    return cache(lambda name: tl_posgen.load(of_measure(name).save(directory / f"{name}.nc"))[name])


def with_inits(result, n, *, shuffled=False):
    """The result as it is with the first n random inits, and with shuffled weights or without."""
    numbers = result.numbers
    kept = ["trained", *numbers.inits[:n], *(numbers.labels_by_null.get("shuffled", ()) if shuffled else ())]
    return replace(result, dataset=result.dataset.sel(init=kept))


SHUFFLING = {"plane_perturbation", "substitution"}  # planes or tokens, themselves


def concludes(result):
    """Whether a measure has findings; attention_examples are pictures."""
    return result.name != "attention_examples"


def is_one_line(error):
    return str(error).strip() != "" and "\n" not in str(error)


# Names


def test_a_condition_has_one_name_in_sentences_tables_and_figures(result):
    names = {
        str(one): result.measure.in_words(one)
        for dim in result.trained.dims
        if dim in result.trained.coords
        for one in result.trained[dim].values.tolist()
    }
    odd = [label for label, name in names.items() if name != label and "_" in label]
    drawn = [figure.to_json() for figure in map(result.plot, result.kinds)] if odd else []
    for shown in (
        *result.findings(),
        compact(result).to_string(),
        labelled(result, result.frame()).to_string(),
        *drawn,
    ):
        assert not [label for label in odd if label in shown]


# Datasets


def test_every_variable_is_declared_with_exactly_its_dims_and_carries_cf_attributes(result):
    variables = result.measure.variables
    assert not [name for name in map(str, {*variables, *result.dataset.data_vars}) if WITH_A_LABEL.search(name)]
    for name, array in result.dataset.data_vars.items():
        declared = variables[name]
        assert tuple(dim for dim in array.dims if dim not in ENGINE) == declared.dims, name
        assert "init" in array.dims or all(name not in null for null in result.nulls), name
        assert ("group" in array.dims) <= declared.interval, name
    for name in variables.keys() & set(result.dataset.variables):
        attributes = result.dataset[name].attrs
        assert variables[name].attributes.items() <= attributes.items(), name
        assert attributes["long_name"] == variables[name].label != "", name
    for dim in ("init", *(dim for one in variables.values() for dim in one.dims if dim in LABELS)):
        if dim in result.dataset.dims:
            assert dim in result.dataset.coords, dim


def test_what_is_declared_is_measured_and_has_an_interval_if_it_says_so(result):
    missing = [name for name in result.measure.variables if name not in result.dataset]
    assert len(missing) <= len(result.measure.variables) // 2, missing  # what depends on options
    for name, one in result.measure.variables.items():
        if one.interval and name in result.dataset:
            array = result.dataset[name]
            assert {"group", "prompt", "item", "end"} & set(array.dims), name
            assert np.isfinite(result.numbers.intervals(name)["low"]).any() or array.isnull().all(), name


def test_null_models_are_labelled_by_their_seeds(result):
    measure = result.measure
    shuffled = ["shuffled 0"] if measure.is_fed and not measure.runs_model else []  # unless asked for
    inits = ["0", "1", *shuffled] if measure.has_null else []
    assert result.dataset["init"].values.tolist() == ["trained", *inits]
    assert len(result.dataset["init_label"]) == 1 + len(inits)
    assert len(result.nulls) == len(inits)


# Numbers and words


def test_the_summary_is_strict_json_of_the_numbers(result):
    report = tl_posgen.Report({result.name: result}, result.provenance)
    entries = json.loads(json.dumps(report.summary(), allow_nan=False))["measures"][result.name]
    places = [(*entry.items(),)[: len(entry) - len(NUMBER)] for entry in entries]
    assert len(set(places)) == len(entries) > 0
    for place in range(0, len(entries), 1 + len(entries) // SHOWN):
        (_, name), *labels = places[place]
        expected = result.numbers(name, **dict(labels)).as_dict()
        for part in NUMBER:
            np.testing.assert_allclose(*([np.asarray(one[part], float)] for one in (entries[place], expected)))


@pytest.mark.parametrize("n", [0, 1, 2])
def test_findings_are_sentences_with_any_number_of_random_inits(result, n):
    found = with_inits(result, n).findings()
    assert found or not concludes(result)
    for sentence in found:
        assert is_one_line(sentence)
        assert not re.search(r"\bnan\b|\binf\b|None|[{}]|\[\]|  ", sentence), sentence
        assert sentence.endswith((".", ")")), sentence
        assert "random init" not in sentence or n or "no random init" in sentence, sentence
        assert "shuffled" not in sentence or result.name in SHUFFLING, sentence
    assert n == 2 or not any("±" in sentence for sentence in found)


def test_sentences_stand_beside_shuffled_weights_alone_too(result):
    found = with_inits(result, 0, shuffled=True).findings()
    told = [one for one in found if "shuffled" in one.lower()]
    expected = bool("shuffled" in result.numbers.labels_by_null and concludes(result))
    assert bool(told) == expected or result.name in SHUFFLING
    assert not [one for one in found if "random init" in one and "no random init" not in one]


def test_null_models_change_none_of_the_models_own_numbers(result):
    alone = with_inits(result, 0)
    xr.testing.assert_equal(alone.trained, result.trained)
    for name, array in result.trained.data_vars.items():
        if array.dtype.kind == "f" and name in result.measure.variables:
            one, other = (side.numbers(name).as_dict() | {"inits": [], "shuffled": []} for side in (alone, result))
            assert one == other, name


def test_a_file_gives_everything_back(result, loaded):
    again = loaded(result.name)
    xr.testing.assert_identical(again.dataset, result.dataset)
    assert again.provenance == result.provenance
    assert again.measure.options() == result.measure.options()
    assert again.findings() == result.findings()
    assert again.kinds == result.kinds
    assert again.token_labels() == result.token_labels()


def test_a_figure_that_chosen_heads_do_not_change_is_declared_of_the_whole_model(result):
    if not set(HEAD) <= set(result.dataset.coords):
        return  # no numbers of single heads
    layer, head = (result.dataset[dim].values[-1].item() for dim in HEAD)
    chosen = result.of_heads((layer, head))
    for kind in result.kinds:
        some, every = (one.plot(kind).to_plotly_json()["data"] for one in (chosen, result))
        assert (to_json_plotly(some) == to_json_plotly(every)) == (kind in result.measure.whole_model), kind


@pytest.mark.parametrize("encoding", sorted(ENCODING_NAMES))
def test_a_model_of_another_encoding_has_its_caveat(result, encoding):
    kind = type(result.measure)
    assert kind.caveats.keys() | kind.without_meaning <= ENCODING_NAMES
    found = replace(result, provenance={**result.provenance, "encoding": encoding}).findings()
    caveats = [kind.caveats[encoding]] if encoding in kind.caveats else []
    for caveat in caveats:
        assert caveat in found[-1]
        assert found[-1].startswith(f"{result.name}: ")
    concluded = len(found) - len(caveats)
    assert (concluded > 0) == (concludes(result) and encoding not in kind.without_meaning)


def parts_of(value):
    """Every number in options, labels and attributes, as words may name it."""
    if isinstance(value, dict):
        return {part for one in value.values() for part in parts_of(one)}
    if isinstance(value, list | tuple | set | np.ndarray):
        return {part for one in np.asarray(value, dtype=object).ravel().tolist() for part in parts_of(one)}
    return {f"{value:g}"} if isinstance(value, int | float) else set(NUMERAL.findall(str(value)))


OF_ONE_HEAD = {"slash_ablation", "plane_perturbation", "length_extrapolation"}  # or of a mean that no Number is
AMONG_HEADS = {"slash_planes": "chance_correlation"}  # with the best distance of another head
CHOSEN = [(1, 2), (0, 1)]
EDIT_NOTHING = ("slash_transfer", "band_ablation")  # or all heads, whichever are measured


@pytest.mark.slow
def test_every_number_in_a_sentence_is_one_of_the_result(result, monkeypatch):
    """It is written by a Number, or by the formatter of numbers; or an option, a label or an attribute."""
    if result.name in OF_ONE_HEAD:
        pytest.skip("its sentences name numbers of single heads")
    written = set()

    def recorded(value, form):
        text = format_number(value, form)
        written.update(NUMERAL.findall(text))
        return text

    for module in ("number", "formatting"):
        monkeypatch.setattr(f"tl_posgen.core.{module}.format_number", recorded)
    sentences = result.measure.findings(result.numbers)
    known = written | parts_of(result.measure.options()) | parts_of(dict(result.trained.attrs))
    known |= parts_of({str(name): one.values for name, one in result.trained.coords.items()})
    told = {number for one in sentences for number in NUMERAL.findall(one) if "." in number}
    assert told <= known, told - known


@pytest.mark.slow
def test_chosen_heads_have_the_numbers_of_the_whole_and_the_others_none(result, small_model):
    arrays = {name: one for name, one in result.trained.data_vars.items() if name != AMONG_HEADS.get(result.name)}
    names = [name for name, one in arrays.items() if set(HEAD) <= set(one.dims) and one.dtype.kind in "fb"]
    if result.name not in EDIT_NOTHING and not result.measure.is_fed:
        return
    asked, heads = [KINDS[kind.name].with_options(OPTIONS.get(kind.name, {})) for kind in result.measure.after], CHOSEN
    cut = {**CUT, "nulls": 0, "heads": heads}
    some = tl_posgen.analyze(small_model, bundled_text(), measures=[*asked, result.measure], **cut)[result.name].trained
    for name in names:
        size = float(np.nanmax(np.abs(result.trained[name]), initial=0))
        for layer, head in heads:
            one, whole = (data[name].sel(layer=layer, head=head, drop=True) for data in (some, result.trained))
            np.testing.assert_allclose(one, whole, atol=1e-6 * size, err_msg=name)
        other = some[name].sel(layer=1, head=1)
        assert not other.any() if other.dtype == bool else other.isnull().all(), name
    if "why" in some:  # examples
        assert set(zip(some["layer"].values, some["head"].values, strict=True)) <= set(heads)


# Tables and pictures


def test_the_frame_has_its_rows_and_a_column_a_headline(result):
    rows, frame = list(result.measure.rows), result.frame()
    assert frame.columns[: len(rows)].tolist() == rows
    if rows:
        assert 0 < len(frame) <= np.prod([result.trained.sizes[row] for row in rows])
        assert not frame.duplicated(rows).any()
    else:
        assert len(frame) <= 1
    for name, one in result.measure.variables.items():
        if one.headline and name in result.trained and set(rows) <= set(one.dims):
            assert [column for column in frame.columns if str(column).split(", ")[0] == name], name
    every = result.frame(every=True)
    assert set(frame.columns) <= set(every.columns)
    for init in result.numbers.nulls:
        assert result.frame(init=init).columns[: len(rows)].tolist() == rows
    headlines = result.headline_frame()
    assert headlines is None or headlines.columns[:2].tolist() == list(HEAD)
    assert headlines is None or headlines.columns[2:].tolist() == list(result.headline_labels())


def test_heads_are_those_of_the_highest_headline(result):
    if tuple(result.measure.rows) != HEAD:
        return
    variables = result.measure.variables
    first = next((name for name, one in variables.items() if one.headline and set(HEAD) <= set(one.dims)), None)
    usual = {"tokens", *result.measure.usual()}
    if first is None or not set(variables[first].dims) <= {*HEAD, *usual}:
        return
    top = result.heads(3)
    assert top.columns[:3].tolist() == ["layer", "head", first]
    assert top[first].tolist() == sorted(result.frame()[first].dropna(), reverse=True)[:3]


def test_labels_select_and_wrong_ones_are_refused_in_one_line(result):
    xr.testing.assert_identical(result.sel(), result.trained)
    for dim in result.trained.dims:
        if dim in result.trained.indexes:
            label = result.trained[dim].values[-1]
            xr.testing.assert_identical(result.sel(**{dim: label}), result.trained.sel({dim: label}))
    for wrong in ({"init": 99}, {"nowhere": 1}, *({dim: "no such label"} for dim in result.trained.dims)):
        for ask in (result.sel, result.frame):
            with pytest.raises(InputError, match=next(iter(wrong))) as error:
                ask(**wrong)
            assert is_one_line(error.value)


def test_the_table_is_that_of_the_model_and_of_its_null_models(result, loaded):
    own = result.table()
    assert len(own) or not len(result.frame())
    pd.testing.assert_frame_equal(loaded(result.name).table(), own)
    alone = with_inits(result, 0).table()  # without the rows about random inits
    assert alone.columns.tolist() == own.columns.tolist()
    assert len(alone) <= len(own)
    for kind in result.numbers.by_null:
        assert len(result.table(kind)) or not len(own)


@pytest.mark.slow
def test_every_kind_of_figure_is_drawn_with_and_without_a_null_and_from_a_file(result, loaded):
    measure = result.measure
    assert set(result.kinds) <= set(measure.figures)
    assert measure.by_head <= set(measure.figures)
    assert set(measure.curves) <= set(measure.variables)
    for kind in result.kinds:
        drawn = result.plot(kind)
        assert drawn.data
        assert drawn.layout.title.text
        assert loaded(result.name).plot(kind).to_json() == drawn.to_json()
        assert with_inits(result, 0).plot(kind).data
    with pytest.raises(InputError, match=r"draws|has no figure"):
        result.plot("no such kind")


@pytest.mark.slow
def test_every_kind_of_figure_is_legible_for_48_layers_of_40_heads(result):
    big = grown(result)
    for kind in big.kinds:
        figure = big.plot(kind)
        legend = [re.sub(r"\d+", "#", str(trace.name)) for trace in figure.data if trace.showlegend]
        assert all(legend.count(name) <= MOST_NAMES for name in legend), kind
        assert len({axis.domain for axis in figure.select_xaxes()}) <= MOST_NAMES, kind
        ticks = [axis.tickvals for axis in (*figure.select_xaxes(), *figure.select_yaxes())]
        assert all(one is None or len(one) <= MOST_TICKS for one in ticks), kind
        bars = [trace.marker.colorbar for trace in figure.data if "marker" in trace and "colorbar" in trace.marker]
        assert all(bar.tickvals is None or len(bar.tickvals) <= MOST_NAMES for bar in bars), kind
        assert figure.layout.height < 4000, kind
        assert len(figure.data) < 400, kind
        rows = [len(trace.y) for trace in figure.data if trace.type == "heatmap" and trace.y is not None]
        assert max(rows, default=0) <= MOST_ROWS, kind


def test_token_views_are_shown_or_their_lack_is_explained(result):
    labels = result.token_labels()
    if result.measure.token_view is None:
        with pytest.raises(InputError, match="has no token-level view"):
            result.show()
        return
    assert labels
    for place in {0, len(labels) - 1}:
        assert result.show(place).local_src
    for place in (-1, len(labels)):
        with pytest.raises(InputError, match=f"example={place}: {result.name} has {len(labels)}"):
            result.show(place)


@pytest.mark.slow
def test_every_measure_is_on_the_page(result):
    page = tl_posgen.Report({result.name: result}, result.provenance).html()
    assert f'id="{result.name}"' in page
    assert result.measure.question in unescape(page)
    rows = page.split('<div class="scroll">')[1].split("</table>")[0].count("<tr") - 1
    assert rows == len(result.frame())
