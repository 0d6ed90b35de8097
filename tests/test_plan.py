"""Plans: what they accept, what they say when they do not, and that they read back as they were written."""

import dataclasses
import pathlib
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xform import plans, registry
from xform.errors import PlanError
from xform.plan import Pass, Plan
from xform.plans import maxtext
from xform.plans.rules import MAXTEXT_RULES, MESH_AXES, RULE_FILES, base_rules, restrict, table
from xform.values import Frozen

Option = str | bool | int | float | Sequence[Any] | Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A pass with an option of every kind."""

    policy: str = "full"
    count: int = 1
    ratio: float = 0.5
    fast: bool = False
    axes: tuple[str, ...] = ()
    rules: Mapping[str, Sequence[str] | Sequence[Sequence[str]]] = dataclasses.field(default_factory=dict)
    mode: Literal["auto", "explicit"] = "auto"
    limit: int | None = None
    block: int | tuple[int, int] = 128
    extra: Mapping[str, Option] | None = None
    stages: ClassVar[tuple[str, ...]] = ("model", "step")

    def rewrite(self, jaxpr: Any, context: Any) -> Any:
        return jaxpr


@dataclasses.dataclass(frozen=True)
class Other:
    size: int
    stages: ClassVar[frozenset[str]] = frozenset({"compiler"})

    def __post_init__(self) -> None:
        if self.size > 9:
            raise PlanError(f"size = {self.size} is more than 9")

    def rewrite(self, jaxpr: Any, context: Any) -> Any:
        return jaxpr


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "sample", f"{__name__}:Sample")
    monkeypatch.setitem(registry.BUILTIN, "other", f"{__name__}:Other")


def wrong(text: str) -> str:
    with pytest.raises(PlanError) as caught:
        Plan.loads(text, "my.toml")
    return str(caught.value)


# ---------------------------------------------------------------- plans as values


def test_a_plan_is_hashable_and_immutable_whatever_it_was_given() -> None:
    rules = {"embed": ["fsdp"], "mlp": [["tensor", "data"], ["tensor"]]}
    plan = Plan({"fsdp": 4}, [Sample(axes=["a"], rules=rules)], axes={"mlp": ["['w'][1]"]})  # type: ignore[arg-type]
    rules["embed"].append("data")
    same = Plan(
        {"fsdp": 4},
        (Sample(axes=("a",), rules={"embed": ("fsdp",), "mlp": (("tensor", "data"), ("tensor",))}),),
    )
    assert {plan: 1}[dataclasses.replace(same, axes={"mlp": ("['w'][1]",)})] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.mesh = {}  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.mesh["fsdp"] = 2  # type: ignore[index]


def test_a_plan_survives_pickling() -> None:
    plan = Plan({"fsdp": 4}, [Sample(rules={"embed": ["fsdp"]})], dcn={"data": 2})
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_pass_that_needs_no_change_is_kept_as_it_is() -> None:
    given_pass = Sample(axes=("a",), rules=Frozen({"embed": ("fsdp",)}), limit=3)
    assert Plan({}, [given_pass]).passes[0] is given_pass


def test_axes_between_slices_come_first_and_the_order_of_axes_matters() -> None:
    plan = Plan({"fsdp": 4, "data": 2}, dcn={"stage": 2, "data": 3})
    assert plan.axis_names == ("stage", "fsdp", "data")
    assert plan != Plan({"data": 2, "fsdp": 4}, dcn={"stage": 2, "data": 3})
    assert plan.mesh == {"data": 2, "fsdp": 4}


def test_passes_of_a_kind_stand_together_in_their_order() -> None:
    a, b, c = Sample("a"), Other(3), Sample("c")
    assert Plan({}, [a, b, c]).passes == (a, c, b)


# ---------------------------------------------------------------- the mesh


@pytest.mark.parametrize(
    ("mesh", "dcn", "reason"),
    [
        ({"fsdp": 0}, {}, r"[mesh] fsdp = 0: the size of an axis is 1 or more, or -1"),
        ({"fsdp": -2}, {}, r"[mesh] fsdp = -2"),
        ({"fsdp": True}, {}, r"[mesh] fsdp = true"),
        ({"fsdp": 2.0}, {}, r"[mesh] fsdp = 2.0"),
        ({"fsdp": "4"}, {}, r'[mesh] fsdp = "4"'),
        ({"fsdp": -1, "tensor": -1}, {}, "[mesh]: only one axis can be -1, not fsdp and tensor"),
        ({"a b": 2}, {}, "[mesh]: 'a b' cannot be the name of an axis"),
        ({"dcn": 2}, {}, "[mesh]: 'dcn' cannot be the name of an axis"),
        ({"fsdp": 2}, {"data": 0}, "[mesh.dcn] data = 0"),
        ({"fsdp": -1}, {"data": -1, "stage": -1}, "[mesh.dcn]: only one axis can be -1"),
        ([("fsdp", 2)], {}, "[mesh]: expected axis = size"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(mesh: Any, dcn: Any, reason: str) -> None:
    with pytest.raises(PlanError, match=re.escape(reason)):
        Plan(mesh, dcn=dcn)


def test_one_axis_of_each_group_may_be_open_and_a_name_may_stand_in_both() -> None:
    plan = Plan({"fsdp": -1, "data": 2}, dcn={"data": -1})
    assert (plan.mesh["fsdp"], plan.dcn["data"]) == (-1, -1)


# ---------------------------------------------------------------- passes


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (Sample, "is not a pass.*: write Sample()"),
        (3, "3 is not a pass"),
        (dataclasses.make_dataclass("Bare", ["x"])(1), "is not a pass"),
    ],
)
def test_what_is_no_pass_is_refused(thing: Any, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Plan({}, [thing])


def test_passes_are_a_list() -> None:
    with pytest.raises(PlanError, match="expected a list of passes, got Other"):
        Plan({}, Other(1))  # type: ignore[arg-type]


def test_a_pass_of_an_unknown_stage_is_refused() -> None:
    class Late(Other):
        stages: ClassVar[frozenset[str]] = frozenset({"link"})

    with pytest.raises(PlanError, match=r"Late acts on \['link'\]: the stages are model, step, compiler"):
        Plan({}, [Late(1)])


def test_options_are_checked_in_python_too() -> None:
    with pytest.raises(PlanError, match="Sample: policy = 3: expected a string"):
        Plan({}, [Sample(policy=3)])  # type: ignore[arg-type]


def test_samples_are_passes() -> None:
    assert isinstance(Sample(), Pass) and isinstance(Other(1), Pass) and not isinstance(3, Pass)


# ---------------------------------------------------------------- TOML


def test_a_plan_is_written_as_tables_without_defaults() -> None:
    passes = [
        Sample("minimal", axes=("a", "b"), rules={"embed": ["fsdp"], "mlp": [["x", "y"], ["x"]]}),
        Other(7),
        Sample(),
    ]
    plan = Plan({"fsdp": 16, "tensor": 4}, passes, dcn={"data": 2}, axes={"mlp": "['w'][1]"})
    assert plan.dumps() == (
        "[mesh]\nfsdp = 16\ntensor = 4\n\n[mesh.dcn]\ndata = 2\n\n"
        "[axes]\nmlp = \"['w'][1]\"\n\n"
        '[[sample]]\npolicy = "minimal"\naxes = ["a", "b"]\n\n'
        '[sample.rules]\nembed = ["fsdp"]\nmlp = [["x", "y"], ["x"]]\n\n'
        "[[sample]]\n\n"
        "[other]\nsize = 7\n"
    )


def test_a_plan_is_saved_to_and_loaded_from_a_file(tmp_path: pathlib.Path) -> None:
    plan = Plan({"fsdp": -1}, [Sample(policy='say "π"\n')])
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert plans.resolve(str(tmp_path / "plan.toml")) == plan


TEXT = st.text(max_size=8)
SCALARS = TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
SAMPLES = st.builds(
    Sample,
    policy=TEXT,
    count=st.integers(),
    ratio=st.floats(allow_nan=False),
    fast=st.booleans(),
    axes=st.lists(TEXT, max_size=3),
    rules=st.dictionaries(
        TEXT, st.lists(TEXT, max_size=2) | st.lists(st.lists(TEXT, max_size=2), max_size=2), max_size=3
    ),
    mode=st.sampled_from(["auto", "explicit"]),
    limit=st.none() | st.integers(),
    block=st.integers() | st.tuples(st.integers(), st.integers()),
    extra=st.none() | st.dictionaries(TEXT, VALUES, max_size=3),
)
AXES = st.dictionaries(
    st.sampled_from(["data", "fsdp", "tensor", "é", "x_1"]), st.integers(1, 2**40), max_size=4
)


@settings(max_examples=60)
@given(
    AXES,
    AXES,
    st.lists(SAMPLES | st.builds(Other, st.integers(0, 9)), max_size=4),
    st.dictionaries(TEXT, TEXT),
)
@example({}, {}, [], {})
@example({}, {}, [Sample(extra={"first": {"a": 1}, "then": 2, "last": {"b": 3}})], {})
@example(
    {"fsdp": -1},
    {"data": -1},
    [Sample(extra={"a": {"b": {"c": [{"d": [1, [2.0]]}]}, "": {}}})],
    {"": "\x00\x7f'\\"},
)
def test_every_plan_reads_back_as_it_was_written(
    mesh: dict[str, int], dcn: dict[str, int], passes: list[Pass], axes: dict[str, str]
) -> None:
    plan = Plan(mesh, passes, dcn, axes)
    again = Plan.loads(plan.dumps())
    assert again == plan and hash(again) == hash(plan)
    assert repr(again) == repr(plan)
    assert again.dumps() == plan.dumps()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp = 4", "my.toml: fsdp = 4 stands in no table: sizes of axes go under [mesh]"),
        ("mesh = 4", "my.toml: [mesh]: expected a table, got 4"),
        ("[mesh]\nfsdp = 0", "my.toml: [mesh] fsdp = 0: the size"),
        ("[mesh]\ndcn = 2", "my.toml: [mesh.dcn]: expected a table, got 2"),
        (
            "[mesh]\nfsdp = 8\n[mesh.dnc]\ndata = 2",
            "my.toml: [mesh.dnc]: the only table under",
        ),
        ("[mesh.dcn]\ndata = 1.5", "my.toml: [mesh.dcn] data = 1.5"),
        (
            "[smaple]",
            "my.toml: [smaple]: no pass 'smaple' (did you mean 'sample'?); there is: ",
        ),
        (
            "[sample]\npolcy = 1",
            "my.toml: [sample]: no option 'polcy' (did you mean 'policy'?); there is: policy, count",
        ),
        ("[sample]\nstages = []", "my.toml: [sample]: no option 'stages'"),
        ("[sample]\npolicy = 3", "my.toml: [sample] policy = 3: expected a string"),
        ("[sample]\ncount = true", "my.toml: [sample] count = true: expected a whole number"),
        ("[sample]\ncount = 1.0", "my.toml: [sample] count = 1.0: expected a whole number"),
        ("[sample]\nfast = 1", "my.toml: [sample] fast = 1: expected true or false"),
        ('[sample]\nratio = "1"', 'my.toml: [sample] ratio = "1": expected a number'),
        ('[sample]\naxes = "a"', 'my.toml: [sample] axes = "a": expected a list, each item a string'),
        ('[sample]\naxes = ["a", 1]', "my.toml: [sample] axes[1] = 1: expected a string"),
        (
            '[sample]\nmode = "explicti"',
            "my.toml: [sample] mode: no such value 'explicti' (did you mean 'explicit'?)",
        ),
        ("[sample]\nmode = 1", 'my.toml: [sample] mode = 1: expected "auto" or "explicit"'),
        ("[sample]\nlimit = false", "my.toml: [sample] limit = false: expected a whole number"),
        (
            "[sample]\nblock = [1]",
            "my.toml: [sample] block = [1]: expected a whole number or tuple[int, int]",
        ),
        ("[sample.rules]\nembed = 1", "my.toml: [sample] rules.embed = 1: expected a list"),
        (
            "[sample]\nlimit = 1979-05-27",
            "my.toml: [sample] limit = datetime.date(1979, 5, 27): expected a whole number",
        ),
        ("[other]", "my.toml: [other]: size must be given: int"),
        ("[other]\nsize = 10", "my.toml: [other]: size = 10 is more than 9"),
        ("[axes]\nmlp = 3", "my.toml: [axes].mlp = 3: expected a string or a list"),
        ("[mesh", "my.toml: "),
    ],
)
def test_a_wrong_file_is_told_the_file_the_table_the_key_and_what_would_do(text: str, message: str) -> None:
    assert wrong(text).startswith(message), wrong(text)


def test_a_pass_without_a_name_and_a_value_without_a_word_are_not_written() -> None:
    @dataclasses.dataclass(frozen=True)
    class Private(Other):
        pass

    with pytest.raises(PlanError, match=r"Private of module .* has no name to be written"):
        Plan({}, [Private(1)]).dumps()
    with pytest.raises(
        PlanError, match=r"\[sample\] extra.x: .*cannot be written in a plan file|\[sample.extra\] x: "
    ):
        Plan({}, [Sample(extra={"x": [None]})]).dumps()  # type: ignore[dict-item]


def test_a_missing_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(PlanError, match=r"none\.toml: cannot be read: No such file"):
        Plan.load(tmp_path / "none.toml")


# ---------------------------------------------------------------- flags


def test_flags_make_the_plan_that_a_file_would() -> None:
    plan = Plan.from_flags(
        "fsdp=4, tensor=-1,dcn.data=2",
        [
            "shard",
            "sample:policy=minimal,axes=[a, b],ratio=2,rules.embed=[[x, y], [x]],fast=true",
            "other:size=3",
        ],
    )
    sample = Sample("minimal", ratio=2.0, fast=True, axes=("a", "b"), rules={"embed": (("x", "y"), ("x",))})
    assert plan == Plan(
        {"fsdp": 4, "tensor": -1}, [registry.find("shard")(), sample, Other(3)], dcn={"data": 2}
    )


def test_a_flag_reads_as_its_option_needs() -> None:
    flags = "sample:policy=3,axes=data,limit=7,mode=explicit,block=[1,2]"
    (_, sample) = Plan.from_flags("fsdp=4", [flags]).passes
    assert sample == Sample("3", axes=("data",), limit=7, mode="explicit", block=(1, 2))
    (_, quoted) = Plan.from_flags("", ['sample:policy="a,b=[c"']).passes
    assert quoted == Sample("a,b=[c")


def test_a_mesh_alone_shards() -> None:
    assert Plan.from_flags("fsdp=16") == plans.fsdp(16)
    assert [type(each) for each in Plan.from_flags("fsdp=16", ["other:size=1"]).passes] == [
        registry.find("shard"),
        Other,
    ]


@pytest.mark.parametrize(
    ("mesh", "use", "message"),
    [
        ("fsdp", "shard", "--mesh fsdp: expected key=value, got 'fsdp'"),
        ("fsdp=x", "shard", '--mesh fsdp = "x": expected a whole number'),
        ("fsdp=2,fsdp=3", "shard", "--mesh fsdp=2,fsdp=3: the axis 'fsdp' is given twice"),
        ("fsdp=0", "shard", "[mesh] fsdp = 0"),
        ("fsdp=2", "sampel", "--use sampel: no pass 'sampel' (did you mean 'sample'?)"),
        (
            "fsdp=2",
            "sample:polcy=x",
            "--use sample:polcy=x: [sample]: no option 'polcy' (did you mean 'policy'?)",
        ),
        ("fsdp=2", "sample:count=x", '--use sample:count=x: count = "x": expected a whole number'),
        ("fsdp=2", "sample:axes=[a", "--use sample:axes=[a: 'axes=[a' leaves a bracket open"),
        ("fsdp=2", "sample:count=1,count=2", "--use sample:count=1,count=2: count is given twice"),
    ],
)
def test_a_wrong_flag_is_quoted(mesh: str, use: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_flags(mesh, [use])
    assert str(caught.value).startswith(message), caught.value


# ---------------------------------------------------------------- presets

ARGUMENTS = {
    "hsdp": "2,4",
    "hsdp_slices": "2,4",
    "tensor_2d": "2,4",
    "fsdp_tensor": "4,2",
    "maxtext": "data=2,fsdp=4,tensor=2",
    "pipeline_large_moe": "2,2,2,2,2,2",
    "cp_as_ep": "2,2,2,2,2",
    "ep_as_cp": "2,2,2,2",
    "ep_as_dp": "2,2,2,2",
    "fsdp_as_dp_for_attn": "2,2,2,2",
    "shard_exp_on_fsdp": "2,2,2,2,2,2",
}


@pytest.mark.parametrize("name", plans.PRESETS)
def test_every_preset_reads_back_and_names_no_axis_that_its_mesh_lacks(name: str) -> None:
    plan = plans.resolve(f"{name}:{ARGUMENTS.get(name, '8')}")
    assert Plan.loads(plan.dumps()) == plan
    (shard,) = plan.passes
    assert isinstance(shard, registry.find("shard"))
    named = {axis for alternatives in shard.rules.values() for axes in alternatives for axis in axes}
    assert named | {*shard.optimizer_axes, *shard.gradient_axes} <= set(plan.axis_names)


def test_presets_by_name_are_the_functions() -> None:
    assert plans.resolve("fsdp") == plans.fsdp() == plans.zero3() == plans.resolve("zero3:-1")
    assert plans.resolve("hsdp:2,n=8") == plans.hsdp(2, 8)
    assert plans.hsdp_slices(2, 16).dcn == {"data": 2}
    assert plans.zero1(8).passes == (registry.find("shard")(optimizer_axes=("data",)),)
    assert plans.megatron_sp(4, n=2).mesh == {"fsdp": 2, "tensor": 4}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fsdq", "--plan fsdq: no file or preset 'fsdq' (did you mean 'fsdp'?)"),
        (
            "fsdp:x",
            "--plan fsdp:x: 'x' is not a size; the sizes of fsdp are n = -1",
        ),
        ("fsdp:1,2", "--plan fsdp:1,2: too many positional arguments; the sizes of fsdp are n = -1"),
        (
            "hsdp",
            "--plan hsdp: missing a required argument: 'replicas'; the sizes of hsdp are replicas, n = -1",
        ),
        ("maxtext:fsdp=2,tensr=3", "maxtext: no axis 'tensr' (did you mean 'tensor'?)"),
        ("cp_as_ep:fsdp=1", "cp_as_ep: every axis has size 1"),
        ("none.toml", "none.toml: cannot be read"),
    ],
)
def test_a_wrong_plan_name_is_answered_with_what_there_is(name: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        plans.resolve(name)
    assert str(caught.value).startswith(message), caught.value


# ---------------------------------------------------------------- MaxText's rules


def test_the_base_rules_are_maxtexts() -> None:
    assert (len(MAXTEXT_RULES), len(table())) == (80, 73)
    assert {axis for _, axes in MAXTEXT_RULES for axis in axes} <= set(MESH_AXES)
    assert table()["activation_vocab"] == (("tensor", "tensor_sequence"), ("tensor",), ("tensor_sequence",))
    assert table()["kv_head_dim"] == ()


def test_rules_on_a_small_mesh_say_each_thing_once() -> None:
    assert restrict(table(), ("fsdp", "tensor"))["activation_vocab"] == (("tensor",),)
    assert restrict(table(), ("fsdp", "tensor"))["embed"] == (("fsdp",),)
    assert restrict(table(), ("fsdp_transpose",))["embed"] == (("fsdp_transpose",),)


@pytest.mark.parametrize("name", RULE_FILES)
def test_a_rule_file_departs_from_the_base_rules_in_known_names_on_axes_of_its_mesh(name: str) -> None:
    file = RULE_FILES[name]
    base = restrict(table(), file.mesh)
    assert set(file.mesh) <= set(MESH_AXES)
    for key, alternatives in file.departures.items():
        assert {axis for axes in alternatives for axis in axes} <= set(file.mesh), key
        assert alternatives != base[key], f"{key} is no departure"
    assert base_rules(name).keys() == base.keys()


def test_an_unknown_set_of_rules_is_answered_with_the_nearest() -> None:
    assert base_rules() == table()
    with pytest.raises(PlanError, match=r"no set of rules 'ep_as_pd' \(did you mean 'ep_as_dp'\?\)"):
        base_rules("ep_as_pd")


def test_a_small_mesh_drops_the_axes_of_a_rule_file_that_it_lacks() -> None:
    (shard,) = maxtext.cp_as_ep(context=2, expert=4, fsdp=2).passes
    assert shard.rules["exp"] == (("context", "expert"),)
    assert shard.rules["activation_length_moe"] == ()
    (shard,) = maxtext.cp_as_ep(fsdp=8).passes
    assert shard.rules == {}
