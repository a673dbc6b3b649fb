"""Records of `turbo`: a pair code is made of the codes of its two values. Twin: `cuda/codecs/turbo.cuh`."""

from polarlm.engine.records.pair_table import record as record
