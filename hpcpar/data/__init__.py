"""Training data: text -> tokens -> memory-mapped shards -> the windows of each rank."""

from __future__ import annotations

from hpcpar.data.batch_sampler import DistributedBatchSampler
from hpcpar.data.corpus import Corpus, Document, Skipped, standard_library
from hpcpar.data.dataset import Dataset
from hpcpar.data.preparation import Prepared, prepare
from hpcpar.data.token_files import Shards, TokenStream, build
from hpcpar.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, tokenizer_of
from hpcpar.data.window_sampler import Sampler

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "Dataset",
    "DistributedBatchSampler",
    "Document",
    "FileTokenizer",
    "Prepared",
    "Sampler",
    "Shards",
    "Skipped",
    "TokenStream",
    "Tokenizer",
    "build",
    "prepare",
    "standard_library",
    "tokenizer_of",
]
