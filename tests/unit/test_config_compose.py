"""A config composes, and each mistake in one is a single line that names the place."""

import pytest

from megatron.efa.config.compose import EXAMPLES, compose
from megatron.efa.config.words import split
from megatron.efa.errors import EfaError


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="run.yaml"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return name

    return write


def values(settings):
    return {setting.name: setting.value for setting in settings}


def places(settings):
    return {setting.name: setting.where for setting in settings}


def test_a_file_anywhere_may_name_the_projects_groups_and_its_own(write):
    write("lr: 1e-3\nmin_lr: ${train.lr}\n", "conf/train/mine.yaml")
    file = write(
        "defaults: [/model: gpt_tiny, /train: mine, _self_]\nmodel:\n  hidden_size: 32\n",
        "conf/run.yaml",
    )
    settings = compose(file)
    assert values(settings)["model.num_attention_heads"] == 4
    assert values(settings)["model.hidden_size"] == 32
    assert values(settings)["train.min_lr"] == 1e-3
    assert places(settings)["model.hidden_size"] == "conf/run.yaml:3"
    assert places(settings)["train.min_lr"] == "conf/train/mine.yaml:2"
    assert places(settings)["model.num_layers"].endswith("examples/model/gpt_tiny.yaml:2")


def test_overrides_set_add_delete_and_choose(write):
    file = write("defaults: [/model: gpt_tiny, _self_]\ntrain: {lr: 1, train_iters: 5}\n")
    words = ["train.lr=2e-4", "data.split='9,1,0'", "~train.train_iters", "model=deepseek_tiny"]
    settings = compose(file, [*words, "cluster=cpu"])
    assert values(settings)["train.lr"] == 2e-4
    assert values(settings)["data.split"] == "9,1,0"
    assert "train.train_iters" not in values(settings)
    assert values(settings)["model.multi_latent_attention"] is True
    assert values(settings)["cluster.distributed_backend"] == "gloo"
    assert places(settings)["train.lr"] == "the override train.lr=2e-4"


def test_overrides_alone_make_a_config():
    assert values(compose(None, ["model=gpt_tiny", "train.lr=3"]))["train.lr"] == 3
    assert compose(None) == []


def test_null_means_not_given(write):
    file = write("train: {lr: null, seed: 1}\ndata: null\n")
    assert values(compose(file)) == {"train.seed": 1}
    assert values(compose(file, ["train.seed=null"])) == {}


def test_a_setting_may_stand_in_any_group_but_in_one_only(write):
    assert values(compose(write("train: {num_layers: 3}\n"))) == {"train.num_layers": 3}
    file = write("model:\n  seq_length: 8\ndata:\n  seq_length: 9\n")
    with pytest.raises(EfaError) as error:
        compose(file)
    assert str(error.value) == (
        "seq_length is set twice, as model.seq_length (run.yaml:2) and as data.seq_length "
        "(run.yaml:4): a key may stand in any group, but in one only"
    )


def test_every_example_composes():
    files = sorted(EXAMPLES.glob("*.yaml"))
    assert files
    for file in files:
        assert compose(str(file))


MISTAKES = {
    "syntax": ("model:\n  a: [1\n", [], "run.yaml:3: not valid YAML: expected ',' or ']'"),
    "duplicate key": ("model:\n  a: 1\n  a: 2\n", [], "run.yaml:3: not valid YAML: found duplic"),
    "list": ("- 1\n", [], "run.yaml: a config holds groups (model, parallel, "),
    "no group": ("modle: {num_layers: 1}\n", [], "run.yaml:1: 'modle' is not a group"),
    "near group": ("modle: {num_layers: 1}\n", [], "did you mean model?"),
    "hydra key": ("hydra: {x: 1}\n", [], "run.yaml:1: 'hydra' is not a group"),
    "scalar group": ("model: gpt_tiny\n", [], "run.yaml:1: model must hold `key: value` lines"),
    "nested": ("model:\n  moe:\n    topk: 2\n", [], "run.yaml:2: model.moe is a mapping, but"),
    "nested override": ("{}", ["model.moe.topk=2"], "the override model.moe.topk=2: model.moe is"),
    "missing group file": (
        "defaults: [/model: gpt_tini, _self_]\n",
        [],
        "run.yaml: there is no gpt_tini.yaml in model or ",
    ),
    "near group file": ("defaults: [/model: gpt_tini]\n", [], "did you mean gpt_tiny?"),
    "missing choice": ("{}", ["cluster=cpus"], "the override cluster=cpus: there is no cpus.yaml"),
    "interpolation": (
        "model:\n  hidden_size: 4\n  ffn_hidden_size: ${model.hiden_size}\n",
        [],
        "run.yaml:3: model.ffn_hidden_size: Interpolation key 'model.hiden_size' not found; "
        "did you mean model.hidden_size?",
    ),
    "interpolation in list": ("data:\n  data_path: [a, '${x.y}']\n", [], "run.yaml:2: data.data_p"),
    "environment": ("data:\n  data_path: ${oc.env:NO_SUCH}\n", [], "'NO_SUCH' not found"),
    "mandatory": ("data:\n  data_path: ???\n", [], "run.yaml:2: data.data_path: Missing mandatory"),
    "single word": ("hello\n", [], "run.yaml:1: a config holds groups (model, parallel, "),
    "cycle": ("defaults: [run]\n", [], "run.yaml: its defaults list leads back to itself"),
    "encoding": ("model: {a: '\x01'}\n", [], "run.yaml: unacceptable character #x0001"),
    "override grammar": ("{}", ["train.lr=[1"], "the override train.lr=[1 cannot be read (no "),
    "override of two values": ("{}", ["data.split=9,1"], "write data.split=[...] for a list"),
    "delete nothing": ("{}", ["~train.lr"], "run.yaml: Could not delete from config. 'train.lr'"),
}


@pytest.mark.parametrize(("text", "overrides", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_naming_its_place(write, text, overrides, sentence):
    with pytest.raises(EfaError) as error:
        compose(write(text), overrides)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named_with_its_nearest(write):
    write("{}", "conf/quick.yaml")
    with pytest.raises(EfaError, match=r"--config conf/quik\.yaml: there is no such file; did you"):
        compose("conf/quik.yaml")
    write("{}", "run.yml")
    with pytest.raises(EfaError, match=r"must end in \.yaml"):
        compose("run.yml")


def test_our_words_are_told_from_megatrons():
    words = split(
        ["--data-path", "0.5", "model=x", "train.lr=3", "a=b", "--config", "c.yaml", "--bf16"]
    )
    assert words.config == "c.yaml"
    assert words.overrides == ["model=x", "train.lr=3"]
    assert words.flags == ["--data-path", "0.5", "a=b", "--bf16"]
    assert split(["--config=c.yaml", "--print-config", "~model.x", "++efa.y=1"]).overrides == [
        "~model.x",
        "++efa.y=1",
    ]
    assert split(["--save=model=x"]).flags == ["--save=model=x"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--config"], "--config needs the path"),
        (["--config", "--bf16"], "--config needs the path"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config is given twice"),
    ],
)
def test_config_takes_one_file(argv, sentence):
    with pytest.raises(EfaError, match=sentence):
        split(argv)
