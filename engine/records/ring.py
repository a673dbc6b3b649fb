"""Records of `ring`: pair codes index one table. Twin: `cuda/codecs/ring.cuh`."""

from polarlm.engine.records.pair_table import record as record
