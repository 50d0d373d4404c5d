"""Fine-tuning of a tiny random ViLT on generated questions: `--task vqa`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.command import call
from tokamix.data import DataError
from tokamix.inference import load_model
from tokamix.mixers.context_broadcast import ContextBroadcast
from tokamix.recipes import load_recipe
from tokamix.train import train
from tokamix.train.loop.optim import create_optimizer
from tokamix.train.tasks.vqa import Vqa
from tokamix.vqa import create_vqa, load_vqa, open_vqa

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.xdist_group("vqa")
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220)}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "colour", "is", "it", "dark", "?"]
SMALL = {"min_answer_count": 1, "batch_size": 8, "lr": 3e-3, "head_lr_scale": 2, "warmup_epochs": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two questions about each of 24 + 6 images of one colour, dark or bright, in VQAv2's format."""
    folder = tmp_path_factory.mktemp("vqa")
    for split, numbers in (("train", range(24)), ("val", range(24, 30))):
        questions, annotations = [], []
        (folder / f"{split}2014").mkdir()
        for n in numbers:
            colour, dark = list(COLOURS)[n % 3], n % 2 == 0
            pixel = tuple(value // (3 if dark else 1) for value in COLOURS[colour])
            image = Image.new("RGB", (48, 32) if n % 4 < 2 else (32, 48), pixel)
            image.save(folder / f"{split}2014" / f"COCO_{split}2014_{n:012d}.jpg")
            for text, answer in (("What colour is it?", colour), ("Is it dark?", "yes" if dark else "no")):
                number = len(questions) + 1000 * (split == "val")
                given = [{"answer": word, "answer_id": i} for i, word in enumerate([answer] * 9 + ["unsure"])]
                questions.append({"question_id": number, "image_id": n, "question": text})
                annotations.append({"question_id": number, "answers": given, "multiple_choice_answer": answer})
        for kind, entries in (("questions", questions), ("annotations", annotations)):
            (folder / f"v2_mscoco_{split}2014_{kind}.json").write_text(json.dumps({kind: entries}))
    return folder


@pytest.fixture(scope="module")
def vilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViLT with random weights, and a tokenizer of a few words."""
    folder = tmp_path_factory.mktemp("vilt")
    torch.manual_seed(0)
    config = transformers.ViltConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=16,
        vocab_size=len(WORDS),
        max_position_embeddings=10,
        initializer_range=0.2,  # learns in a few steps
    )
    transformers.ViltForQuestionAnswering(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(data: Path, vilt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViLT with context broadcasting that learned the questions."""
    settings = {**SMALL, "epochs": 6, "context_broadcast": "cb"}
    folder = tmp_path_factory.mktemp("runs") / "vqa"
    result = train(str(vilt), str(data), None, folder, task="vqa", overrides=settings, device="cpu", quiet=True)
    assert result.score == 100, [row["vqa"] for row in result.epochs]
    return folder


def test_data(data: Path) -> None:
    splits = open_vqa(data, min_count=1)
    assert splits.classes == ("blue", "green", "no", "red", "yes")
    assert (len(splits.train), len(splits.val)) == (48, 12)
    assert splits.train.scores(0) == {3: 1.0}, "the single 'unsure' is no class"
    assert splits.train.image(4).size == (32, 48)
    assert open_vqa(data, min_count=15).classes == ("no", "yes")


def test_hidden_files_of_a_mac_are_no_images(data: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(data, tmp_path / "vqa")
    image = next(copied.rglob("*.jpg"))
    (image.parent / f"._{image.name}").write_bytes(b"Mac OS X")
    assert len(open_vqa(copied, min_count=1).train) == 48


def test_trained_run(trained: Path, data: Path, vilt: Path) -> None:
    """The folder gives back the network with context broadcasting, and it answers."""
    model = load_vqa(trained)
    assert sum(isinstance(module, ContextBroadcast) for module in model.network.modules()) == 2
    for n, (dark, colour) in enumerate([("yes", "red"), ("no", "green"), ("yes", "blue")], 24):
        image = data / "val2014" / f"COCO_val2014_{n:012d}.jpg"
        assert model.answer(image, "What colour is it?")[0][0] == colour
        assert model.answer(image, "Is it dark?", top=1)[0][0] == dark
    assert "visual-question-answering" in (trained / "README.md").read_text()
    with pytest.raises(ValueError, match=r"holds a ViLT that answers questions; load it with tokamix\.vqa\.load_vqa"):
        load_model(trained)
    with pytest.raises(ValueError, match="is not a run of task vqa"):
        load_vqa(vilt)


def test_evaluation_does_not_depend_on_batches(trained: Path, data: Path, vilt: Path) -> None:
    """Images of different sizes are not padded to one: the mean of context broadcasting would change."""
    recipe = load_recipe("small_vqa", {**SMALL, "context_broadcast": "cb"}, model=str(vilt), task="vqa")
    task = Vqa(recipe, str(data))
    network = task.create_model(str(vilt), None, False).eval()
    network.load_state_dict(load_vqa(trained).network.state_dict())
    logits = {}
    for size in (1, 12):
        options = {"batch_size": size, "rank": 0, "world_size": 1, "device": torch.device("cpu")}
        loader = task.create_loaders(task_options(**options))[1]
        seen: dict[int, torch.Tensor] = {}
        hook = network.register_forward_hook(lambda _, args, output, seen=seen: seen.update({len(seen): output.logits}))
        assert task.evaluate(network, loader) == {"vqa": 100}
        hook.remove()
        logits[size] = torch.cat(list(seen.values())).sort(0).values
    assert len(logits[1]) == 12
    torch.testing.assert_close(logits[1], logits[12], rtol=1e-4, atol=1e-4)


def task_options(**values: object) -> object:
    from tokamix.train.tasks.task import LoaderOptions

    return LoaderOptions(**values)


def test_head_learns_faster(vilt: Path) -> None:
    recipe = load_recipe("vilt_vqa")
    assert (recipe.epochs, recipe.batch_size, recipe.lr, recipe.warmup_epochs) == (10, 256, 1e-4, 1)
    network = create_vqa(vilt, ["yes", "no"]).network
    optimizer = create_optimizer(network, recipe, torch.device("cpu"))
    scales = {id(p): group["lr_scale"] for group in optimizer.param_groups for p in group["params"]}
    assert len(scales) == len(list(network.parameters()))
    assert {scales[id(p)] for p in network.classifier.parameters()} == {10}
    assert {scales[id(p)] for p in network.vilt.parameters()} == {1}


def test_wrong_data(data: Path, tmp_path: Path) -> None:
    """One sentence each."""

    def changed(name: str, change: object) -> Path:
        folder = tmp_path / name
        shutil.copytree(data, folder)
        path = folder / "v2_mscoco_train2014_questions.json"
        content = json.loads(path.read_text())
        change(folder, content["questions"])
        path.write_text(json.dumps(content))
        return folder

    with pytest.raises(DataError, match=r"has no file \*train\*questions\*\.json; it needs exactly one"):
        open_vqa(tmp_path)
    with pytest.raises(DataError, match=r"the folder .*nosuch does not exist; give one with VQAv2's questions"):
        open_vqa(tmp_path / "nosuch")
    with pytest.raises(DataError, match=r"no answer in .* occurs 99 times .* use --set min_answer_count=1"):
        open_vqa(data, min_count=99)
    with pytest.raises(DataError, match="has no image with number 77, which question 0 is about"):
        open_vqa(changed("image", lambda _, questions: questions[0].update(image_id=77)))
    with pytest.raises(DataError, match=r"the annotations of .* have question 1, but the questions do not"):
        open_vqa(changed("question", lambda _, questions: questions.pop(1)))
    with pytest.raises(DataError, match="an entry of 'questions' has no 'question'"):
        open_vqa(changed("text", lambda _, questions: questions[0].pop("question")))
    with pytest.raises(DataError, match="have the same number; images are found by their numbers"):
        open_vqa(changed("twice", lambda folder, _: Image.new("RGB", (8, 8)).save(folder / "a3.png")))


def test_wrong_commands(data: Path, vilt: Path, tmp_path: Path) -> None:
    common = ("train", "--task", "vqa", "--data", data, "--device", "cpu", "--workers", 0, "--output", tmp_path)
    out = call(*common, "--model", tmp_path / "nosuch", "--set", "min_answer_count=1", code=1)
    assert "cannot be loaded as a ViLT" in out
    out = call(*common, "--model", vilt, "--checkpoint", vilt, "--set", "min_answer_count=1", code=1)
    assert "task vqa starts from a ViLT by name" in out
    out = call(*common, "--model", vilt, "--set", "compile=true", code=1)
    assert "compile is not supported for task vqa" in out
    out = call(*common, "--model", vilt, "--recipe", "small_dino", code=1)
    assert "the recipe small_dino is for task dino, not vqa" in out
