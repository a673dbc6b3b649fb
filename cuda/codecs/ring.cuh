// Pairs of channels as points on circles. Twin of engine/codecs/ring.py.

template <class L>
struct ring : PairTable<L> {};
