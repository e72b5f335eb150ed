# ExDark, 12 classes in the dark with boxes and without masks: `python projects/low_light/tools/exdark_to_coco.py
# data/exdark`. Train and val, 4800 images, are for training, and test, 2563 images, for testing.
exdark = dict(type='ExDarkDataset', data_root='data/exdark/', data_prefix=dict(img='ExDark/'))
exdark_test = 'annotations/test.json'
