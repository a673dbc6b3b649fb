"""Records of `turbo`: a pair code joins the codes of its two values. Twin: `cuda/codecs/turbo.cuh`."""

from polarlm.engine.records.pair_table import record as record
