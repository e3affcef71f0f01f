import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SAMPLE = [
    "It was the best of times, it was the worst of times.\n\nIt was the age of wisdom.",
    "def main():\n    return 42  # the answer\n",
]


def build_tokenizer(adds_bos: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE * 4, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
        )
    # Both know a BOS token; only what the tokenizer does tells them apart. The short context makes
    # it warn of long texts where it is not asked not to.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", model_max_length=8
    )


@pytest.fixture(scope="session")
def with_bos():
    return build_tokenizer(adds_bos=True)


@pytest.fixture(scope="session")
def without_bos():
    return build_tokenizer(adds_bos=False)


@pytest.fixture(scope="session", params=["with_bos", "without_bos"])
def tokenizer(request):
    return request.getfixturevalue(request.param)
