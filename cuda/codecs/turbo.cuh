// A scalar code for each value; decoding looks up two neighbours at once. Twin of engine/codecs/turbo.py.

template <class L>
struct turbo : PairTable<L> {};
