"""Records of `linear`: a pair code joins the bytes of its two values. Twin: `cuda/codecs/linear.cuh`."""

from polarlm.engine.records.pair_table import record as record
