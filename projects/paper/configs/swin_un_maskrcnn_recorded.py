# Records the statistics of the norms in every step, for projects/paper/tools/report.py.
_base_ = ['../../digits/configs/swin_un_maskrcnn.py']
custom_imports = dict(imports=['mmunorm', 'projects.digits.digits', 'projects.paper.paper'], allow_failed_imports=False)

custom_hooks = [dict(type='NormStatisticsHook')]
