"""The command line's arguments: mistakes are one line that names them and what is nearest."""

import os

import pytest

from xform import cli


@pytest.mark.parametrize(
    "args, says",
    [
        (["chek", "m:f"], "xform: no command 'chek'; did you mean check?"),
        ([], "xform: the following arguments are required: COMMAND"),
        (["check", "--plam", "fsdp:8", "m:f"], "did you mean --plan?"),
        (
            ["check", "m:f", "--steps", "0"],
            "xform check: argument --steps: '0' is not a whole number of 1 or more",
        ),
        (["check", "m:f", "--steps", "x"], "'x' is not a whole number"),
        (["check", "m:f", "--tolerance", "-1"], "'-1' is not a number of 0 or more"),
        (["check", "m:f", "--tolerance", "nan"], "'nan' is not a number of 0 or more"),
        (["explain", "m:f", "--devices", "0", "w"], "--devices: '0' is not"),
        (["explain", "m:f"], "required: PATH"),
        (["dump", "m:f", "--before", "--after"], "not allowed with argument --before"),
        (["dump", "m:f", "--html", os.curdir], ". is a directory"),
        (["dump", "m:f", "--html", os.devnull + "/x"], "there is no directory"),
        (["aot", "m:f", "--topology", "v5e-4", "--save-hlo", "/no/x"], "/no/x: there is no directory /no"),
        (["aot", "m:f"], "required: --topology"),
    ],
)
def test_a_mistake_is_one_line(args, says, capsys):
    with pytest.raises(SystemExit) as end:
        cli._parse(["xform", *args])
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert len(said.err.splitlines()) == 1 and says in said.err and "--help)" in said.err


def test_a_file_in_a_directory_without_permission_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root
    with pytest.raises(SystemExit):
        cli._parse(["xform", "dump", "m:f", "--html", str(tmp_path / "page.html")])
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["axes", "explain", "dump", "check", "aot", "passes"])
def test_help_describes_every_option_and_fits_the_terminal(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli._parse(["xform", command, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and max(map(len, text.splitlines())) <= 110
    assert "--verbosity" not in text and "alsologtostderr" not in text
    options = text[text.index("options:") :].splitlines()[1:]
    bare = [
        a
        for a, b in zip(options, [*options[1:], ""], strict=True)
        if len(a.split("  ")) < 3 and b[:4] != " " * 4
    ]
    assert not bare


def test_flags_of_absl_are_taken_before_and_after_the_command():
    assert cli._parse(["xform", "--verbosity=0", "axes", "m:f"]).target == "m:f"
    assert cli._parse(["xform", "axes", "m:f", "--verbosity=0"]).target == "m:f"
