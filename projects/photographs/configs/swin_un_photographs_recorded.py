# Records the norms' statistics of every step, for RESULTS.md.
_base_ = ['./swin_un_photographs.py']
custom_imports = dict(imports=['mmunorm', 'projects.digits.digits', 'projects.paper.paper'], allow_failed_imports=False)

custom_hooks = [dict(type='NormStatisticsHook')]
