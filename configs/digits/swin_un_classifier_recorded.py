# Records the norms' statistics of every step, for docs/how_to/analysis.md.
_base_ = ['./swin_un_classifier.py']

custom_hooks = [dict(type='NormStatisticsHook')]
