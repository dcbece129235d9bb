"""transformers: the Trainer with a tiny model made from a configuration."""

from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import ringloader
from frameworks import kept_options, loader_ways, training
from parity import option_cases

pytestmark = pytest.mark.usefixtures("forget_accelerates_state")


class Sentences(torch.utils.data.Dataset):
    """Sentences of different lengths, as a tokenizer gives them."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        size = 3 + index % 5
        noise = int(torch.randint(1, 40, ()))
        return {"input_ids": [noise] + [(index * k) % 40 for k in range(size)], "labels": index % 2}


def pad(samples):
    """Without a tokenizer: to the longest, with a mask."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    masks = [[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples]
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.tensor(masks),
        "labels": torch.tensor([sample["labels"] for sample in samples]),
    }


def tiny_bert():
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return BertForSequenceClassification(config)


def arguments(folder, **options):
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=2,
        **{"save_strategy": "no", "eval_strategy": "epoch", **options},
    )


def outcome(trainer):
    kept = ("loss", "grad_norm", "eval_loss", "step", "epoch")
    return [
        [{key: row[key] for key in kept if key in row} for row in trainer.state.log_history],
        training.weights(trainer.model),
    ]


@loader_ways.INSTALL_ONLY
@pytest.mark.parametrize("persistent", [False, True])
def test_train_and_evaluate(compare, tmp_path, persistent):
    def program(way):  # noqa: ARG001
        trainer = Trainer(
            tiny_bert(),
            arguments(tmp_path, dataloader_persistent_workers=persistent),
            data_collator=pad,
            train_dataset=Sentences(18),
            eval_dataset=Sentences(7),
        )
        trainer.train()
        result = outcome(trainer)
        assert len([row for row in result[0] if "eval_loss" in row]) == 2
        return [result, trainer.predict(Sentences(5)).predictions.tolist()]

    ours = compare(program)
    # Two epochs, two evaluations and a prediction; the workers of the first two may live on.
    assert len(ours.made) == (3 if persistent else 5)
    assert {made.loader for made in ours.made} == {torch.utils.data.DataLoader}


@loader_ways.INSTALL_ONLY
def test_going_on_from_a_checkpoint(compare, tmp_path):
    """The trainer skips the batches that were trained on: another loader, built from the first."""

    def program(way):
        folder = tmp_path / way.name
        options = {"save_strategy": "steps", "save_steps": 3}

        def make():
            return Trainer(
                tiny_bert(),
                arguments(folder, **options),
                data_collator=pad,
                train_dataset=Sentences(18),
                eval_dataset=Sentences(7),
            )

        make().train()
        again = make()
        again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        return outcome(again)

    compare(program)


class Numbered(torch.utils.data.Dataset):
    """Sentences that tell which they are, without noise."""

    def __len__(self):
        return 18

    def __getitem__(self, index):
        return {"input_ids": [index + 1, *range(2, 5 + index % 4)], "labels": index % 2}


class Watching(Trainer):
    """Notes the sentences of each step."""

    def training_step(self, model, inputs, *others):
        self.seen.append(inputs["input_ids"][:, 0].tolist())
        return super().training_step(model, inputs, *others)


class LoaderState(TrainerCallback):
    """Puts the state of the training loader into each checkpoint."""

    def on_save(self, args, state, _control, train_dataloader, **_):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(train_dataloader.state_dict(), folder / "loader.pt")


def numbered(folder, seed=1, train=Watching, **options):
    torch.manual_seed(seed)
    options = {
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "no",
    } | options
    made = train(tiny_bert(), arguments(folder, **options), data_collator=pad, train_dataset=Numbered())
    made.seen = []
    return made


def test_going_on_from_a_checkpoint_sees_the_next_sample(tmp_path):
    """The Trainer draws the indices of the epoch again, and has the loader read what is left of them."""
    with ringloader.installed():
        whole = numbered(tmp_path)
        whole.train()
        assert len(whole.seen) == 10
        for step in (3, 9):
            resumed = numbered(tmp_path / "again")
            resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
            assert resumed.seen == whole.seen[step:]
            assert training.weights(resumed.model) == training.weights(whole.model)


@pytest.mark.parametrize("step", [3, 9])
def test_the_state_of_a_loader_of_ours_in_a_checkpoint(tmp_path, step):
    """As docs/guides/resuming.md says: nothing is skipped by the Trainer then."""

    class Ours(Watching):
        workers, seed = 0, 3

        def get_train_dataloader(self):
            self.loader = ringloader.StatefulDataLoader(
                self.train_dataset,
                batch_size=4,
                shuffle=True,
                num_workers=self.workers,
                collate_fn=pad,
                generator=torch.Generator().manual_seed(self.seed),
            )
            if self.args.resume_from_checkpoint:
                file = Path(self.args.resume_from_checkpoint) / "loader.pt"
                self.loader.load_state_dict(torch.load(file, weights_only=True))
            return self.loader

    whole = numbered(tmp_path, train=Ours)
    whole.add_callback(LoaderState())
    whole.train()
    checkpoint = str(tmp_path / f"checkpoint-{step}")
    resumed = numbered(
        tmp_path / "again", train=Ours, resume_from_checkpoint=checkpoint, ignore_data_skip=True
    )
    resumed.workers, resumed.seed = 2, 50
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.seen == whole.seen[step:]
    assert training.weights(resumed.model) == training.weights(whole.model)


@loader_ways.INSTALL_ONLY
def test_a_stream(compare, tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info()
            return map(Sentences(18).__getitem__, range(worker.id, 18, worker.num_workers))

    def program(way):  # noqa: ARG001
        options = arguments(tmp_path, max_steps=7, eval_strategy="no")
        trainer = Trainer(tiny_bert(), options, data_collator=pad, train_dataset=Stream())
        trainer.train()
        return outcome(trainer)

    compare(program)


@loader_ways.CLASS_ONLY
def test_a_trainer_whose_method_returns_our_loader(compare, tmp_path):
    """The trainer uses the loader that `get_train_dataloader` returns as it is."""

    def program(way):
        class Ours(Trainer):
            def get_train_dataloader(self):
                return way.DataLoader(
                    self.train_dataset, batch_size=4, shuffle=True, num_workers=2, collate_fn=pad
                )

            def get_eval_dataloader(self, eval_dataset=None):  # noqa: ARG002
                return way.DataLoader(self.eval_dataset, batch_size=4, num_workers=1, collate_fn=pad)

        trainer = Ours(
            tiny_bert(), arguments(tmp_path), train_dataset=Sentences(18), eval_dataset=Sentences(7)
        )
        trainer.train()
        return outcome(trainer)

    ours = compare(program)
    assert {made.loader for made in ours.made} == {ringloader.DataLoader}


@pytest.mark.parametrize("options", option_cases.CASES.values(), ids=option_cases.CASES)
def test_loaders_of_the_trainer_have_the_installed_options(tmp_path, options):
    trainer = Trainer(tiny_bert(), arguments(tmp_path), pad, Sentences(12), Sentences(8))
    with ringloader.installed(**options), kept_options.of_iterators() as found:
        for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
            iterator = iter(loader)
            next(iterator)
            iterator.close()
    assert [{name: getattr(one, name) for name in options} for one in found] == [options] * 2
