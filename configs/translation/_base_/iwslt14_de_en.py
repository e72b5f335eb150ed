# IWSLT14 German to English, 0.18 million pairs, as two plain text files for each split.
_base_ = ['../../_base_/translation.py']

folder = 'data/translation/iwslt14_de_en'
subwords = f'{folder}/subwords.model'
model = dict(backbone=dict(vocab_size=10000))
train_dataloader = dict(
    dataset=dict(source=f'{folder}/train.src', target=f'{folder}/train.tgt', subwords=subwords))
val_dataloader = dict(
    dataset=dict(source=f'{folder}/valid.src', target=f'{folder}/valid.tgt', subwords=subwords))
test_dataloader = dict(
    dataset=dict(source=f'{folder}/test.src', target=f'{folder}/test.tgt', subwords=subwords))
val_evaluator = dict(subwords=subwords, source=f'{folder}/valid.src', reference=f'{folder}/valid.tgt')
test_evaluator = dict(subwords=subwords, source=f'{folder}/test.src', reference=f'{folder}/test.tgt')
