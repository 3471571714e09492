import json
import re

import pytest
from bundles import packed
from fake_toolkit import sm80_spec
from signatures import A100, signature

import cutlass_ops as co
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.session import Session
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.rows import ROWS
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.ship import shipping
from cutlass_ops.ship.shipping import Catalogue, Kernels, shipment

pytestmark = pytest.mark.usefixtures("session")

MINE = 'import cutlass_ops as co\n\n@co.epilogue\ndef twice(acc):\n    """D = 2 A @ B."""\n    return acc * 2\n'


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "catalogue.toml"
        path.write_text(text)
        return shipping.load(str(path))

    return write


def kernels(**fields):
    return Kernels(**({"ops": ("gemm_bias_relu",), "archs": ("sm_80",), "shapes": ("512x4096x4096",)} | fields))


# ---- What it means -------------------------------------------------------------------------------------------------


def test_a_shape_is_the_kernel_that_serves_it():
    found = shipment(Catalogue(kernels=(kernels(),)))
    assert list(found.specs) == [dispatch.choose(signature(), A100, Problem(512, 4096, 4096))[0]]
    ((of, (choice,)),) = found.choices.items()
    assert of == signature()
    assert (choice.capability, choice.n, choice.k) == ((8, 0), 4096, 4096)


def test_a_weight_is_every_kernel_that_some_number_of_rows_needs():
    found = shipment(Catalogue(kernels=(kernels(shapes=(), weights=("4096x1024",)),)))
    assert set(found.specs) == set(dispatch.specs_for(signature(), A100, 4096, 1024))
    ((choice,),) = found.choices.values()
    chosen = {choice.at(m).config for m in ROWS}
    assert chosen <= {spec.config for spec in found.specs}
    assert len(chosen) > 1


@pytest.mark.slow
def test_every_combination():
    wanted = kernels(
        ops=("gemm", "gemm_bias_relu"), dtypes=("bf16", "f16"), layouts=("row,col", "row,row"), out_dtypes=("f32",)
    )
    found = shipment(Catalogue(kernels=(wanted,)))
    assert len(found.choices) == 8
    assert {str(s.d) for s in found.specs} == {"f32.row"}
    assert {(str(s.a), str(s.b)) for s in found.specs} == {
        (f"{t}.row", f"{t}.{b}") for t in ("bf16", "f16") for b in ("row", "col")
    }


def test_alignments_follow_from_shapes():
    found = shipment(Catalogue(kernels=(kernels(archs=("sm_80", "sm_90a"), shapes=("16x4096x4095",)),)))
    assert {s.target for s in found.specs} == {"sm_80", "sm_90"}
    assert {type(s.config) for s in found.specs} == {Sm80Config}
    assert {s.a.alignment for s in found.specs} == {1}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"ops": "gemm"}, "ops must be a tuple of names and epilogues, not 'gemm'"),
        ({"ops": (3,)}, "3 is of the type int: name a function decorated"),
        ({"shapes": "1x1x1"}, "shapes must be a tuple of strings, not '1x1x1'"),
        ({"weights": (3,)}, "weights must be a tuple of strings, not (3,)"),
        ({"input_dtypes": {"bias": "f32"}}, "input_dtypes must be a tuple of pairs of strings, not {'bias': 'f32'}"),
        ({"input_dtypes": (("bias",),)}, "must have pairs of name and dtype"),
    ],
)
def test_mistakes_in_python_are_named(fields, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        kernels(**fields)


def test_what_no_kernel_serves_is_named():
    with pytest.raises(
        ConfigError, match=r"^cutlass_ops\.epilogue\.composed:swiglu: no kernel supports a bf16\.row, .* on NVIDIA A100"
    ):
        shipment(Catalogue(kernels=(kernels(ops=("gemm", "cutlass_ops.epilogue.composed:swiglu")),)))


def test_a_table_is_its_most_useful_kernels():
    usual = policies.policy(signature(), A100).kernels
    points = (Point(Problem(300, 400, 512), "2026-01-01", tuple(Measured(c, 1.0 + i, i) for i, c in enumerate(usual))),)
    table = Table(A100.name, A100.multiprocessors, signature(), points, kernels=usual[:3])
    found = shipment(Catalogue(tuned=(shipping.Tuned(table, "sm_80", kernels=2),)))
    assert [spec.config for spec in found.specs] == list(usual[:2])
    assert found.tables == (table,)
    ((choice,),) = found.choices.values()
    assert choice.at(300).config == usual[0]
    assert (choice.n, choice.k) == (400, 512)
    with pytest.raises(ConfigError, match="kernels must be a positive integer, not 0"):
        shipping.Tuned(table, "sm_80", kernels=0)


# ---- TOML ----------------------------------------------------------------------------------------------------------


def test_a_toml_catalogue(toml, tmp_path):
    (tmp_path / "mine_for_toml.py").write_text(MINE)
    (tmp_path / "spec.json").write_text(json.dumps(sm80_spec(5).to_json()))
    table = Table(A100.name, A100.multiprocessors, signature(), kernels=policies.policy(signature(), A100).kernels[:1])
    (tmp_path / "table.json").write_text(json.dumps(table.to_json()))
    found = toml("""
        format = 1
        specs = ["spec.json"]

        [[kernels]]
        ops = ["gemm_bias_relu", "mine_for_toml:twice"]
        archs = ["sm_80"]
        dtypes = ["f16"]
        shapes = ["1,16x4096x4096"]

        [[kernels]]
        ops = ["gemm"]
        archs = ["sm_80", "sm_90a"]
        weights = ["4096x4096"]

        [[tables]]
        path = "table.json"
        arch = "sm_80"
        kernels = 3
    """)
    assert found.specs == (sm80_spec(5),)
    assert found.kernels[0] == Kernels(
        ops=("gemm_bias_relu", "mine_for_toml:twice"), archs=("sm_80",), dtypes=("f16",), shapes=("1,16x4096x4096",)
    )
    assert found.kernels[1].weights == ("4096x4096",)
    assert found.tuned == (shipping.Tuned(table, "sm_80", 3),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the catalogue has no format"),
        ("format = 2", "format is 2: this version reads 1"),
        ("format = true", "format is True: this version reads 1"),
        ("format = 1", "the catalogue is empty"),
        ("format = ", "Invalid value"),
        ("format = 1\nkernel = []", "the catalogue has no field 'kernel': use format, version, kernels, tables, specs"),
        ("format = 1\nkernels = 3", "write [[kernels]] before each"),
        ("format = 1\n[[kernels]]", "[[kernels]] number 1: it has no archs, ops"),
        ('K archs = ["sm_80"]\nops = "gemm"\nshapes = ["1x1x1"]', "ops must be a list of strings"),
        ('K archs = ["sm_80"]\nops = []\nshapes = ["1x1x1"]', "ops is empty"),
        ('K archs = ["sm_80"]\nops = ["gemm"]', "neither shapes nor weights"),
        (
            'K archs = ["sm_75"]\nops = ["gemm"]\nshapes = ["1x1x1"]',
            "archs has 'sm_75': use sm_80, sm_86, sm_89, sm_90a",
        ),
        ('K archs = ["sm_80"]\nops = ["gem"]\nshapes = ["1x1x1"]', "unknown name 'gem': use gemm, gemm_bias"),
        ('K archs = ["sm_80"]\nops = ["a:b"]\nshapes = ["1x1x1"]', "a:b cannot be imported"),
        (
            'K archs = ["sm_80"]\nops = ["json:dumps"]\nshapes = ["1x1x1"]',
            "name a function decorated with @cutlass_ops.epilogue",
        ),
        (
            'K archs = ["sm_80"]\nops = ["gemm"]\nshapes = ["1x1"]',
            "'1x1' is not a problem size: it has 2 extents, not 3. Give MxNxK",
        ),
        ('K archs = ["sm_80"]\nops = ["gemm"]\nshapes = ["1x0x1"]', "'1x0x1' is not a problem size"),
        ('K archs = ["sm_80"]\nops = ["gemm"]\nweights = ["1x1x1"]', "'1x1x1' is not the size of a weight"),
        (
            'K archs = ["sm_80"]\nops = ["gemm"]\nshapes = ["1x1x1"]\ndtypes = ["f128"]',
            "dtypes has 'f128': use bf16, f16",
        ),
        (
            'K archs = ["sm_80"]\nops = ["gemm"]\nshapes = ["1x1x1"]\nlayouts = ["row"]',
            "layouts has 'row': use row,row",
        ),
        ('K archs = ["sm_80"]\nops = ["gemm"]\nshapes = ["1x1x1"]\nshape = 1', "it has no field 'shape'"),
        (
            'K archs = ["sm_80"]\nops = ["gemm"]\nshapes = ["1x1x1"]\ninput_dtypes = ["f32"]',
            "input_dtypes must be a table",
        ),
        ('K archs = ["sm_80"]\nops = ["gemm"]\nshapes = ["1x1x1"]\ninput_dtypes = {x = "f64"}', "has 'f64'"),
        (
            'K archs = ["sm_80"]\nops = ["gemm_bias"]\nshapes = ["1x1x1"]\ninput_dtypes = {x = "f32"}',
            "[[kernels]] number 1: input_dtypes has 'x': the inputs of gemm_bias are bias",
        ),
        ('K archs = ["sm_80"]\nops = ["gemm"]\nshapes = ["9999999999x1x9999999999"]', "it has a matrix of more than"),
        ('K archs = ["sm_80"]\nops = ["gemm"]\nweights = ["9999999999x9999999999"]', "it has more than"),
        ('format = 1\n[[tables]]\npath = "none.json"\narch = "sm_80"', "none.json cannot be read: No such file"),
        (
            'format = 1\n[[tables]]\npath = 3\narch = "sm_80"',
            "path must be a printable string of 1 to 4096 characters, not 3",
        ),
        ('format = 1\n[[tables]]\npath = "catalogue.toml"\narch = "sm_80"', "is not a tuning table"),
    ],
)
def test_mistakes_are_named(toml, text, why):
    text = text.replace("K ", "format = 1\n[[kernels]]\n")
    with pytest.raises(ConfigError, match=re.escape(why)) as error:
        toml(text)
    assert "catalogue.toml: " in str(error.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def (\n", r"cannot be imported: SyntaxError: invalid syntax \(broken_module\.py, line 1\)"),
        ("\n1 / 0\n", r"cannot be imported: ZeroDivisionError: division by zero \(.*broken_module\.py, line 2\)"),
        ("import sys\nsys.exit(3)\n", "cannot be imported: SystemExit: 3"),
        ("import no_such_module\n", "cannot be imported: No module named 'no_such_module'"),
        (
            "import cutlass_ops as co\n@co.epilogue\ndef f(acc):\n    return acc.nothing\n",
            "cannot be imported: .*nothing",
        ),
    ],
)
def test_a_users_module_that_fails(toml, tmp_path, text, why):
    (tmp_path / "broken_module.py").write_text(text)
    with pytest.raises(ConfigError, match=rf"catalogue\.toml: \[\[kernels\]\] number 1: broken_module:f {why}"):
        toml('format = 1\n[[kernels]]\narchs = ["sm_80"]\nops = ["broken_module:f"]\nshapes = ["1x1x1"]')
    with pytest.raises(ConfigError, match=rf"broken_module\.py {why}"):
        shipping.load(str(tmp_path / "broken_module.py"))


# ---- Python --------------------------------------------------------------------------------------------------------


def test_a_python_catalogue(tmp_path, monkeypatch):
    text = MINE + (
        "\nfrom cutlass_ops.ship.shipping import Catalogue, Kernels\n"
        'catalogue = Catalogue(kernels=(Kernels(ops=(twice,), archs=("sm_80",), shapes=("1x64x64",)),))\n'
    )
    (tmp_path / "mine_in_python.py").write_text(text)
    by_path = shipping.load(str(tmp_path / "mine_in_python.py"))
    monkeypatch.chdir(tmp_path)
    by_name = shipping.load("mine_in_python:catalogue")
    assert [len(shipment(c).specs) for c in (by_path, by_name)] == [1, 1]
    assert list(shipment(by_path).specs) == list(shipment(by_name).specs)


def test_a_loaded_bundle_changes_nothing(tmp_path):
    wanted = Catalogue(kernels=(kernels(),))
    usual = list(shipment(wanted).specs)
    other = next(s for s in dispatch.specs(signature(), A100) if s not in usual)
    packed(tmp_path, [other]).write(tmp_path / "a")
    with Session().active():
        co.load_bundle(tmp_path / "a")
        assert dispatch.specs(signature(), A100) == (other,)
        assert list(shipment(wanted).specs) == usual
