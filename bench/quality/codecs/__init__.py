"""Cache types of other projects, to compare with ours: one file each, as in `engine.codecs`. No engine has them."""
