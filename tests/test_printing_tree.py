"""Pytrees as indented trees."""

import pytest

from xform.printing.tree import columns, joined, tree


def paths(*texts, cells=("f32[8]", "embed")):
    return [(text.split("/"), cells) for text in texts]


@pytest.mark.parametrize(
    "keys, text",
    [
        (["[0]", "[1]", "[2]"], "[0..2]"),
        (["[0]", "[1]", "[10]", "[11]", "[3]"], "[0..1, 3, 10..11]"),
        (["['gate']", "['up']"], "['gate', 'up']"),
        (["['block_0']", "['block_1']", "['block_10']", "['block_2']"], "['block_0..2', 'block_10']"),
        ([".mu", ".nu"], ".mu, .nu"),
        (["['w']"], "['w']"),
    ],
)
def test_keys_of_a_level_are_joined(keys, text):
    assert joined(keys) == text


def test_layers_alike_stand_once_and_one_that_differs_stands_apart():
    alike = paths(*[f"[0]/['layers']/[{i}]/['w']" for i in (0, 1, 2, 4)])
    other = paths("[0]/['layers']/[3]/['w']", cells=("f32[9]", "mlp"))
    rows = tree([*alike, *other])
    assert ("  [0..2, 4]['w']", "f32[8]", "embed") in rows
    assert ("  [3]['w']", "f32[9]", "mlp") in rows


def test_a_branch_seen_before_is_referred_to():
    names = ["a", "b", "c", "d"]
    shapes = {name: (f"f32[{i}]", name) for i, name in enumerate(names)}
    leaves = [([top, f"['{n}']"], shapes[n]) for top in (".params", ".mu", ".nu") for n in names]
    rows = tree([(["[0]", *path], cells) for path, cells in leaves])
    assert [row[0] for row in rows if row[0].strip().startswith(".")] == ["  .params, .mu, .nu"]
    rows = tree([*leaves, *[(["opt", ".mu", f"['{n}']"], shapes[n]) for n in names]])
    assert rows[-1] == ("opt.mu", "as .params, .mu, .nu: 4 leaves")


def test_every_leaf_of_a_tree_without_likeness_is_printed():
    rows = tree([(["[0]"], ("f32[1]", "a")), (["[1]", ".x"], ("f32[2]", "b"))])
    assert rows == [("[0]", "f32[1]", "a"), ("[1].x", "f32[2]", "b")]
    assert columns(rows) == "[0]    f32[1]  a\n[1].x  f32[2]  b"


def test_two_hundred_layers_take_as_many_lines_as_two():
    def layers(n):
        return [([f"['h_{i}']", f"['{w}']"], (w,)) for i in range(n) for w in "abc"]

    assert len(tree(layers(200))) == len(tree(layers(2))) == 4
