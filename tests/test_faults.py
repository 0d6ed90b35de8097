"""Whose fault an exception is, told from its frames, and what is said of it."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from xform import faults
from xform.errors import Decline, PlanError, RewriteError
from xform.rewrite import rewrite


def raised(fn, *args):
    with pytest.raises(BaseException) as caught:
        fn(*args)
    return caught.value


@pytest.mark.parametrize("error", [PlanError("fsdp = 3"), Decline("no mask")])
def test_a_bad_plan_is_told_in_its_own_words(error):
    assert faults.told(error) == (2, str(error))


def test_an_exception_of_the_users_code_shows_the_users_lines_alone():
    def model(x):
        return x @ jnp.ones((5, 7))

    code, text = faults.told(raised(lambda: jax.make_jaxpr(model)(jnp.ones((3, 4)))))
    assert code == 2
    first, *rest = text.splitlines()
    assert first.startswith("your program failed: TypeError: dot_general requires")
    assert "test_faults.py" in rest[-1] and rest[-1].endswith("in model: return x @ jnp.ones((5, 7))")
    assert "site-packages" not in text and "Traceback" not in text


def test_an_exception_below_the_users_code_is_xforms_and_its_traceback_is_kept():
    jaxpr = jax.make_jaxpr(jnp.tanh)(1.0)
    error = raised(lambda: rewrite(jaxpr, None, None, None))
    code, text = faults.told(error)
    assert code == 3 and text.startswith("a fault of xform, not of your program or plan: TypeError")
    kept = pathlib.Path(text.rsplit(" ", 1)[1])
    assert "Traceback" in kept.read_text()
    kept.unlink()


def test_a_broken_rewrite_is_xforms_wherever_it_was_raised():
    code, text = faults.told(raised(lambda: (_ for _ in ()).throw(RewriteError("pass shard: f32 for bf16"))))
    assert code == 3 and "pass shard" in text
    pathlib.Path(text.rsplit(" ", 1)[1]).unlink()


def test_an_interruption_is_one_word():
    assert faults.told(KeyboardInterrupt()) == (130, "interrupted")


def test_of_a_long_message_the_first_paragraph_is_told():
    error = ValueError("first line\nsecond line\n\nmany more\nparagraphs")
    assert faults.summary(error) == "ValueError: first line\n  second line"
