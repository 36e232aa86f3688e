"""Every error crosses from one process to another: as its name and text, and pickled."""

import pickle

import pytest

from penstock import errors
from penstock.errors import InvalidRecord, PenstockError, from_wire


def with_subclasses(kind: type[PenstockError]) -> list[type[PenstockError]]:
    below = [each for sub in kind.__subclasses__() for each in with_subclasses(sub)]
    return [each for each in (kind, *below) if each.__module__ == errors.__name__]


def make(kind: type[PenstockError]) -> PenstockError:
    names_field = issubclass(kind, errors._NamesField)
    return kind("data.a[3]", "is too: long") if names_field else kind("no: such thing")


@pytest.mark.parametrize("kind", with_subclasses(PenstockError))
def test_an_error_arrives_as_what_it_was(kind: type[PenstockError]) -> None:
    raised = make(kind)

    for arrived in (from_wire(kind.__name__, str(raised)), pickle.loads(pickle.dumps(raised))):
        assert type(arrived) is kind
        assert str(arrived) == str(raised)
        assert getattr(arrived, "field", None) == getattr(raised, "field", None)


@pytest.mark.parametrize("name", ["MyError", "timedelta", "_NamesField", "UnstagedChanges", ""])
def test_a_name_that_is_no_error_of_ours_is_an_error_all_the_same(name: str) -> None:
    arrived = from_wire(name, "why")

    assert type(arrived) is PenstockError
    assert str(arrived) == "why"


def test_a_text_that_names_no_field_arrives() -> None:
    assert "nothing" in str(from_wire(InvalidRecord.__name__, "nothing"))
