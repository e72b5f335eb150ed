# Records the norms' statistics of every step, for RESULTS.md.
_base_ = ['./swin_un_photographs.py']

custom_hooks = [dict(type='NormStatisticsHook')]
