// Pairs of channels, rounded to points on circles. Twin of engine/codecs/ring.py.

template <class L>
struct ring : PairTable<L> {};
