"""What every measure keeps to before it measures anything: its options, docstring and command."""

import json
import re
import sys
from dataclasses import MISSING, dataclass, fields, replace

import option_values
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quick_options import KINDS, NAMES, OPTIONS
from written import write_measure

from tl_posgen.cli.commands import app_for
from tl_posgen.cli.options import argument_help, as_words
from tl_posgen.core import registry
from tl_posgen.core.measure import Measure, paragraphs_of
from tl_posgen.core.options import annotations_of
from tl_posgen.errors import InputError
from tl_posgen.position import Variance

ANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}
FIELDS = [(name, one.name) for name, kind in KINDS.items() for one in fields(kind)]


def refusal_of(name, option, value):
    """The message of the refusal; None where the value is accepted."""
    needed = {one.name for one in fields(KINDS[name]) if one.default is MISSING and one.default_factory is MISSING}
    assert needed <= {option}
    try:
        KINDS[name].with_options({option: value})
    except InputError as error:
        return str(error)
    return None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "option"), FIELDS)
@settings(max_examples=12, **ANY)
@given(data=st.data())
def test_wrong_values_of_an_option_are_refused_in_one_line_and_right_ones_kept(name, option, data):
    annotation = annotations_of(KINDS[name])[option]
    refused = refusal_of(name, option, data.draw(option_values.wrong(annotation))) or "accepted"
    assert refused.startswith(f"{name}: {option} = ")
    assert "\n" not in refused
    value = data.draw(option_values.right(annotation))
    refused = refusal_of(name, option, value)
    assert refused is None or name in BETWEEN_OPTIONS, refused
    if refused is None:
        json.dumps(KINDS[name].with_options({option: value}).options(), allow_nan=False)


BETWEEN_OPTIONS = {  # measures that refuse what the annotation of one option cannot say
    "slash_toy": "what the toy is made of has to fit together",
    "token_coupling": "two positions at least",
}


@pytest.mark.parametrize("name", KINDS)
def test_unknown_options_are_named_with_those_there_are(name):
    with pytest.raises(InputError, match=f"{name} has no option 'no_such'; it has"):
        KINDS[name].with_options({"no_such": 1})


# Declarations and commands


@pytest.mark.parametrize("name", KINDS)
def test_the_docstring_describes_the_measure_once(name):
    kind = KINDS[name]
    first, *more = paragraphs_of(kind)
    assert kind.name == name
    assert first.endswith((".", ":", ";"))
    assert not re.match(r"(How|What|Which|Whether|The same|A measure)\b", first), first
    assert more
    assert not more[0].startswith(("Args:", "Source:", "Example:"))
    assert [one for one in more if one.startswith("Source: ")]
    assert kind.question
    if name in NAMES:  # the settings of the others are the arguments of their functions
        assert argument_help(kind).keys() == {one.name for one in fields(kind)}
    assert all(words.endswith((".", "")) for words in argument_help(kind).values())


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_one_of_the_command(name):
    kind, annotations = KINDS[name], annotations_of(KINDS[name])
    command = name.replace("_", "-")
    app = app_for([command])
    arguments = app[command].assemble_argument_collection()
    for one in fields(kind):
        if "Mapping" in str(annotations[one.name]):  # which words cannot give
            continue
        option, default = f"--{one.name.replace('_', '-')}", getattr(kind(), one.name)
        assert arguments[option].parameter.help, option
        if default not in (None, ()) and not isinstance(default, bool):
            _, bound, _ = app.parse_args([command, option, as_words(default)], exit_on_error=False, print_error=False)
            assert replace(kind(), **bound.arguments).options() == kind().options(), option


def test_every_measure_is_one():
    assert all(isinstance(kind, type) and issubclass(kind, Measure) for kind in KINDS.values())
    assert set(OPTIONS) <= set(NAMES)
    assert registry.measurable() == sorted({*NAMES} | {point.name for point in registry.plug_ins()})


def test_a_measure_of_a_module_that_is_not_registered_takes_options(tmp_path):
    kind = write_measure(tmp_path, 1, registered=False).KeySize
    assert kind.__module__ not in sys.modules
    assert kind(power=2).options() == {"power": 2}
    with pytest.raises(InputError, match="key_size: power = -1: give a whole number"):
        kind(power=-1)


def test_an_option_of_a_class_that_is_no_dataclass_is_refused():
    class Undecorated(Variance):
        skip: int = 3

    with pytest.raises(InputError, match="undecorated: skip is no option of it; put @dataclass"):
        Undecorated()


def test_two_measures_of_one_column_are_refused():
    @dataclass(frozen=True)
    class Twin(Variance):
        pass

    with pytest.raises(InputError, match="variance and twin both give the column"):
        registry.requested([Variance(), Twin()])
