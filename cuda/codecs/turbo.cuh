// A scalar code for each value; two neighbours are read at once, from a table of pairs. Twin of engine/codecs/turbo.py.

template <class L>
struct turbo : PairTable<L> {};
