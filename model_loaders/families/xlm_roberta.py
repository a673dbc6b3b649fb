"""XLM-R and RoBERTa: BERT whose first token has the position after padding's. multilingual-e5, bge-m3.

bge-reranker has a head that scores pairs of texts.
"""

from functools import partial

from polarlm.model_loaders.config import ModelConfig
from polarlm.model_loaders.families._encoder import NAMES, bert, prefixes
from polarlm.model_loaders.fields import Fields
from polarlm.model_loaders.files.tensor_table import tensor_table

MODEL_TYPES = ("xlm-roberta", "roberta", "camembert")
ARCHITECTURES = (
    *("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"),
    *("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
    *("CamembertModel", "CamembertForSequenceClassification"),
)
_HEAD = {"classifier.dense.": "model.score_dense.", "classifier.out_proj.": "model.score."}
PREFIXES = prefixes("roberta.") | _HEAD
tensors = partial(tensor_table, names=NAMES)


def configure(fields: Fields) -> ModelConfig:
    return bert(fields, "xlm_roberta", first_position=fields.integer("pad_token_id", 1, minimum=0) + 1)
