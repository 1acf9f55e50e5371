"""A setting becomes exactly the flags with which Megatron's own parser gives that value."""

import argparse
import enum
import json
import os
import warnings

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

os.environ.setdefault("NO_VCS_VERSION", "1")

from megatron.efa.arguments import (
    ENTRY_FLAGS,
    NOT_IN_YAML,
    ON_CPUS,
    add_efa_arguments,
    build_parser,
)
from megatron.efa.config.compose import EXAMPLES, Setting, compose
from megatron.efa.config.flags import Flags
from megatron.efa.config.show import show
from megatron.efa.config.words import GROUPS
from megatron.efa.errors import EfaError

OUR_FLAGS = (
    "--efa-cluster",
    "--efa-groups",
    "--efa-data-parallel",
    "--efa-expert-chunks",
    "--efa-dispatch-dtype",
    "--efa-placement",
    "--efa-pipeline",
    "--efa-tensor",
    "--efa-traffic-interval",
    "--efa-traffic-dir",
    "--efa-traffic-trace",
)

TEXT = st.text(st.sampled_from("aZ09 -_=./:,'\"#{}[]()&*!|>%@`~?\\é日"), max_size=12)
TEXT = TEXT.filter(lambda text: text != "--")  # refused, see below
ELEMENT = TEXT.filter(lambda text: not text.startswith("-"))


@pytest.fixture(scope="module")
def upstream():
    """Megatron's parser as Megatron makes it, without anything of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training.arguments import add_megatron_arguments
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture(scope="module")
def ours(upstream):
    """Megatron's arguments as YAML keys: not those of ours, which its parser does not know."""
    own = [flag.removeprefix("--").replace("-", "_") for flag in OUR_FLAGS]
    return Flags(build_parser(), hidden=(*NOT_IN_YAML, *own))


def defaults(parser):
    return vars(parser.parse_args([]))


def one_value(action):
    """A strategy of (value in YAML, value that the parser must return) for one value of a flag."""
    kind = action.type
    if action.choices is not None:
        names = {c.name if isinstance(c, enum.Enum) else c: c for c in action.choices}
        return st.sampled_from(list(names.items()))
    if kind is bool:
        return st.booleans().map(lambda b: (b, b))
    if kind is int:
        return st.integers(-(10**12), 10**12).map(lambda i: (i, i))
    if kind is float:
        numbers = st.floats(allow_nan=False, allow_infinity=False)
        return st.one_of(numbers, st.integers(-9, 9)).map(lambda x: (x, float(x)))
    if kind in (None, str):
        return TEXT.map(lambda text: (text, text))
    if "tuple" in kind.__name__:
        return st.lists(st.integers(-9, 99), min_size=1).map(lambda items: (items, tuple(items)))
    if "freq" in kind.__name__:
        patterns = st.lists(st.integers(0, 1), min_size=1).map(lambda items: (items, items))
        return st.one_of(patterns, st.just(("[0]*2+[1]", [0, 0, 1])), st.just((3, 3)))
    assert kind.__name__ == "_parse_cuda_graph_modules_arg", kind
    return st.sampled_from(["attn", "mlp", "full"]).map(lambda name: (name, kind(name)))


def any_value(action):
    """The same for a whole argument: a switch, one value, or a list of them."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return st.booleans().map(lambda b: (b, b))
    one = one_value(action)
    if action.nargs is None:
        return one
    if action.type in (None, str) and action.choices is None:
        one = ELEMENT.map(lambda text: (text, text))
    if action.type is float:
        one = st.floats(0, 1e9).map(lambda x: (x, x))
    least, most = {"*": (0, 5), "+": (1, 5)}.get(action.nargs, (action.nargs, action.nargs))
    pairs = st.lists(one, min_size=least, max_size=most)
    return pairs.map(lambda many: ([a for a, _ in many], [b for _, b in many]))


def assignments(flags, names):
    return st.fixed_dictionaries({name: any_value(flags.actions(name)[0]) for name in names})


def yaml_text(chosen, groups):
    lines = {group: [] for group in groups}
    for index, (name, (value, _)) in enumerate(chosen.items()):
        text = json.dumps(value, ensure_ascii=False)
        lines[groups[index % len(groups)]].append(f"  {name}: {text}")
    return "".join(f"{g}:\n" + "\n".join(x) + "\n" for g, x in lines.items() if x)


def check(upstream, ours, file, chosen):
    words = [word for setting in compose(str(file)) for word in ours.of(setting)]
    parsed = vars(upstream.parse_args(words))
    expected = defaults(upstream) | {name: value for name, (_, value) in chosen.items()}
    for name in chosen:
        kinds = [type(action) for action in ours.actions(name)]
        if kinds == [argparse._StoreTrueAction] and expected[name] is False:
            expected[name] = defaults(upstream)[name]  # off by not being given: False or None
    wrong = [name for name in expected if repr(parsed[name]) != repr(expected[name])]
    assert not wrong, [(name, parsed[name], expected[name]) for name in wrong]


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_yaml_gives_upstreams_parser_exactly_its_values(data, upstream, ours, tmp_path):
    names = data.draw(st.lists(st.sampled_from(ours.names()), min_size=1, max_size=30, unique=True))
    chosen = data.draw(assignments(ours, names))
    file = tmp_path / "run.yaml"
    file.write_text(yaml_text(chosen, GROUPS), encoding="utf-8")
    check(upstream, ours, file, chosen)


@given(data=st.data())
@settings(
    max_examples=2,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # shrinking 800 values takes minutes
)
def test_every_argument_of_megatrons_can_be_set(data, upstream, ours, tmp_path):
    for start in range(0, len(ours.names()), 100):
        chosen = data.draw(assignments(ours, ours.names()[start : start + 100]))
        file = tmp_path / "run.yaml"
        file.write_text(yaml_text(chosen, GROUPS), encoding="utf-8")
        check(upstream, ours, file, chosen)


@given(value=st.one_of(TEXT, st.just("1e-3"), st.just("yes"), st.just("${x}"), st.floats(0, 1)))
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_shown_is_a_config_that_composes_to_the_same(value, tmp_path):
    setting = Setting("data", "split", value, "run.yaml:1")
    file = tmp_path / "shown.yaml"
    file.write_text(show([setting], [], []), encoding="utf-8")
    assert [s.value for s in compose(str(file))] == [value]


def test_our_flags_are_these_and_none_is_megatrons(upstream):
    parser = add_efa_arguments(argparse.ArgumentParser(add_help=False))
    own = set(parser._option_string_actions)
    assert own == {*ENTRY_FLAGS, *OUR_FLAGS}
    assert not own & set(upstream._option_string_actions)
    assert not {action.dest for action in parser._actions} & set(defaults(upstream))
    assert not [flag for flag in upstream._option_string_actions if flag.startswith("--efa")]


def test_our_flags_can_be_given_in_yaml():
    names = Flags(build_parser(), hidden=NOT_IN_YAML).names()
    assert {flag.removeprefix("--").replace("-", "_") for flag in OUR_FLAGS} <= set(names)


def test_help_lists_our_flags_and_all_of_megatrons(upstream):
    text = build_parser().format_help()
    assert "--print-config" in text
    shown = [a for a in upstream._actions if a.help != argparse.SUPPRESS]
    assert len(shown) > 700
    assert all(flag in text for action in shown for flag in action.option_strings)


def test_yaml_and_flags_of_the_same_run_parse_to_the_same_arguments(upstream, ours):
    words = ["model=gpt_tiny", "train.lr=1e-3", "data.data_path=[0.3,/a,0.7,/b]", "cluster=cpu"]
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 "
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
        "--lr 1e-3 --data-path 0.3 /a 0.7 /b --distributed-backend gloo --transformer-impl local "
        "--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-bias-swiglu-fusion "
        "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm"
    )
    from_yaml = [word for setting in compose(None, words) for word in ours.of(setting)]
    assert upstream.parse_args(from_yaml) == upstream.parse_args(flags.split())


def test_every_example_is_known_to_megatron(upstream, ours):
    groups = ("model", "data", "train", "parallel", "cluster")
    for file in sorted(EXAMPLES.rglob("*.yaml")):
        choice = [f"{file.parent.name}={file.stem}"] if file.parent.name in groups else []
        found = compose(str(EXAMPLES / "mock.yaml" if choice else file), choice)
        upstream.parse_args([word for setting in found for word in ours.of(setting)])


@pytest.mark.parametrize("cluster", ["cpu", "gpu"])
@pytest.mark.parametrize("model", sorted(p.stem for p in (EXAMPLES / "model").glob("*.yaml")))
def test_every_example_model_rotates_as_megatron_can(cluster, model):
    found = compose(str(EXAMPLES / "mock.yaml"), [f"cluster={cluster}", f"model={model}"])
    args = {setting.key: setting.value for setting in found}
    if args.get("multi_latent_attention") and args["rope_type"] != "yarn":
        assert args.get("apply_rope_fusion") is False  # true by default, and then refused


MISTAKES = {
    "unknown": ("num_layer", 3, "Megatron has no argument 'num_layer'; did you mean num_layers?"),
    "far": ("qqqq", 3, "Megatron has no argument 'qqqq'"),
    "flag's name": ("norm_epsilon", 1, "--norm-epsilon sets the argument layernorm_epsilon; write"),
    "negative": ("no_rope_fusion", True, "write apply_rope_fusion: false"),
    "integer": ("num_layers", "two", 'is "two", but --num-layers wants an integer'),
    "float for integer": ("num_layers", 2.0, "is 2.0, but --num-layers wants an integer"),
    "switch for integer": ("num_layers", True, "is true, but --num-layers wants an integer"),
    "list for integer": ("num_layers", [1], "is [1], but --num-layers wants an integer"),
    "number": ("lr", "fast", 'is "fast", but --lr wants a number'),
    "text": ("split", False, "is false, but --split wants text"),
    "switch": ("bf16", "yes", 'is "yes", but wants true or false'),
    "bool": ("onnx_safe", 1, "is 1, but --onnx-safe wants true or false"),
    "choice": ("recompute_granularity", "ful", "takes one of full, selective; did you mean full?"),
    "enum": ("attention_backend", "flsh", "auto; did you mean flash?"),
    "number of values": (
        "rampup_batch_size",
        [1, 2],
        "has 2 values, but --rampup-batch-size takes",
    ),
    "empty list": ("recompute_modules", [], "is an empty list, but --recompute-modules takes one"),
    "bytes": ("split", b"9", "is \"b'9'\", but --split wants text"),
    "mapping in list": ("data_path", [{"a": 1}], 'is {"a": 1}, but --data-path wants text'),
    "null in list": ("data_path", ["a", None], "is null, but --data-path wants text"),
    "flag in list": ("data_path", ["a", "-x"], "'-x' would be read as a flag"),
    "end of flags": ("chat_template", "--", "'--' ends the flags; it cannot be a value"),
    "choice in list": ("moe_router_load_balancing_type", ["aux"], "takes one of aux_loss, "),
    "expression": ("moe_layer_freq", "all", 'is "all", but --moe-layer-freq wants an expression'),
    "ours": ("config", "x.yaml", "Megatron has no argument 'config'"),
    "upstream's yaml": ("yaml_cfg", "x.yaml", "Megatron has no argument 'yaml_cfg'"),
}


@pytest.mark.parametrize(("key", "value", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_value_is_one_line_naming_file_and_key(ours, key, value, sentence):
    with pytest.raises(EfaError) as error:
        ours.of(Setting("train", key, value, "run.yaml:7"))
    assert str(error.value).startswith(f"run.yaml:7: train.{key}")
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_defaults_on_cpus_are_in_the_example_and_differ_from_upstreams(monkeypatch):
    upstreams = {name: build_parser().get_default(name) for name in ON_CPUS}
    assert not any(upstreams[name] == value for name, value in ON_CPUS.items())
    monkeypatch.setattr("megatron.efa.cpu.enabled", lambda: True)
    parser = build_parser()
    assert {name: parser.get_default(name) for name in ON_CPUS} == ON_CPUS
    assert set(ON_CPUS) <= {action.dest for action in parser._actions}
    example = yaml.safe_load((EXAMPLES / "cluster/cpu.yaml").read_text())
    assert example.items() >= ON_CPUS.items()
