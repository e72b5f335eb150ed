"""The ids of special tokens, the same in every subword model."""
PAD, UNK, BOS, EOS = 0, 1, 2, 3
