# Records the norms' statistics of every step, for docs/results/photographs.md.
_base_ = ['./swin_un_photographs.py']

custom_hooks = [dict(type='NormStatisticsHook')]
