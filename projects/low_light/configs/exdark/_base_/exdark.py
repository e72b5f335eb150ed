# ExDark, 12 classes in the dark, as `python projects/low_light/tools/exdark_to_coco.py data/exdark` writes it: boxes,
# no masks. It is trained on its train and val, 4800 images, and tested on its test, 2563.
exdark = dict(type='ExDarkDataset', data_root='data/exdark/', data_prefix=dict(img='ExDark/'))
exdark_test = 'annotations/test.json'
