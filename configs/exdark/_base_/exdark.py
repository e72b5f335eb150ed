# ExDark, 12 classes in the dark, as `python tools/dataset/exdark_to_coco.py data/exdark` writes it: boxes, no masks. It
# is trained on its train and val, 4800 images, and tested on its test, 2563.
classes = ('Bicycle', 'Boat', 'Bottle', 'Bus', 'Car', 'Cat', 'Chair', 'Cup', 'Dog', 'Motorbike', 'People', 'Table')
exdark = dict(
    type='CocoDataset', data_root='data/exdark/', metainfo=dict(classes=classes), data_prefix=dict(img='ExDark/'))
exdark_test = 'annotations/test.json'
