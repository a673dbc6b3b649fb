"""Cache types of other projects as references in NumPy, to compare with ours: one file each, from what they publish.

They are codecs as in `engine.codecs`, but no engine has them: `polarlm quality text.txt --codec FILE` measures one, as
others publish it without conditioning: `--types f16,nvfp4:plain`. The first block of a sequence is in full precision
with every type, also where its project codes it.
"""
