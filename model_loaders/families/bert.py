"""BERT and encoders of its form: all-MiniLM, bge, e5, gte, mxbai, Arctic Embed.

GGUF files of XLM-R call themselves BERT: their tables of positions begin with the first token's.
"""

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._encoder import NAMES, bert, layout, prefixes
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
GGUF = layout("bert")
PREFIXES = prefixes("bert.") | {"bert.pooler.dense.": "model.score_dense.", "classifier.": "model.score."}
tensors = partial(tensor_table, names=NAMES)


def configure(fields: Fields) -> ModelConfig:
    return bert(fields, "bert")
