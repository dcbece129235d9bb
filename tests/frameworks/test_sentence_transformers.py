"""sentence-transformers: its trainer's samplers and collators, and `old_fit` over loaders of the user's."""

import pytest
from datasets import Dataset, DatasetDict
from sentence_transformers import (
    InputExample,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import ringloader
from frameworks import loader_ways, training

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(40))]


pytestmark = pytest.mark.usefixtures("forget_accelerates_state")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A folder with a tiny model and its tokenizer, as a hub would give them."""
    folder = str(tmp_path_factory.mktemp("bert"))
    words = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=16, **special).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=20,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def model_of(bert):
    return SentenceTransformer(modules=[Transformer(bert), Pooling(16)], device="cpu")


def text(index):
    return " ".join(WORDS[5 + index * step % 40] for step in range(1, 3 + index % 4))


def pairs(count=20):
    rows = range(count)
    return Dataset.from_dict(
        {"anchor": [text(row % 9) for row in rows], "positive": [text(row + 1) for row in rows]}
    )


def classes(count=24):
    return Dataset.from_dict(
        {"sentence": [text(row) for row in range(count)], "label": [row % 4 for row in range(count)]}
    )


def ranking(model):
    return losses.MultipleNegativesRankingLoss(model)


def triplets(model):
    return losses.BatchAllTripletLoss(model)


def trainer_of(bert, folder, train, loss, cls=SentenceTransformerTrainer, **options):
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=2,
        **{"save_strategy": "no", "eval_strategy": "epoch", **options},
    )
    model = model_of(bert)
    return cls(model, arguments, train_dataset=train, eval_dataset=pairs(6), loss=loss(model))


def outcome(trainer):
    trainer.train()
    kept = ("loss", "grad_norm", "eval_loss", "step")
    return [
        [{key: row[key] for key in kept if key in row} for row in trainer.state.log_history],
        training.weights(trainer.model),
    ]


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_without_duplicates(compare, bert, tmp_path, persistent):
    def program(way):  # noqa: ARG001
        options = {"batch_sampler": "no_duplicates", "dataloader_persistent_workers": persistent}
        return outcome(trainer_of(bert, tmp_path, pairs(), ranking, **options))

    ours = compare(program)
    assert len(ours.made) == (2 if persistent else 4)


@loader_ways.INSTALL_ONLY
def test_batches_by_label(compare, bert, tmp_path):
    def program(way):  # noqa: ARG001
        options = {"batch_sampler": "group_by_label", "eval_strategy": "no"}
        return outcome(trainer_of(bert, tmp_path, classes(), triplets, **options))

    compare(program)


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("order", ["round_robin", "proportional"])
def test_several_datasets(compare, bert, tmp_path, order):
    """Each batch is of one of them, with a sampler over samplers."""

    def program(way):  # noqa: ARG001
        train = DatasetDict(first=pairs(), second=pairs(8))
        options = {"multi_dataset_batch_sampler": order, "eval_strategy": "no"}
        return outcome(trainer_of(bert, tmp_path, train, ranking, **options))

    compare(program)


@loader_ways.CLASS_ONLY
def test_a_trainer_that_converts_what_it_prepared(compare, bert, tmp_path):
    def program(way):
        class Ours(SentenceTransformerTrainer):
            def get_train_dataloader(self):
                loader = super().get_train_dataloader()
                if way.name == "class":
                    ringloader.convert(loader.base_dataloader)
                return loader

        return outcome(trainer_of(bert, tmp_path, pairs(), ranking, Ours, eval_strategy="no"))

    compare(program)


def test_old_fit(compare, bert, tmp_path):
    """The trainer puts a collation of the model's into the loader that it was given."""

    def program(way):
        model = model_of(bert)
        examples = [InputExample(texts=[text(row), text(row + 1)], label=row / 20) for row in range(20)]
        loader = way.DataLoader(examples, batch_size=4, shuffle=True, num_workers=2)
        model.old_fit(
            [(loader, losses.CosineSimilarityLoss(model))],
            epochs=2,
            output_path=str(tmp_path),
            show_progress_bar=False,
        )
        return training.weights(model)

    compare(program)
