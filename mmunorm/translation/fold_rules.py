"""Where the norms of the translator go when it is folded."""
from ..fusion.rules import Into, Reads, Stream, Unties, fold_rule
from ..residuals.fold_rules import residual_layer, stations_of
from .transformer import CrossAttention, DecoderLayer, EncoderLayer, FeedForward, SelfAttention, UNTransformer

fold_rule(SelfAttention)(lambda module: [Reads('qkv')])
fold_rule(CrossAttention)(lambda module: [Reads('q')])
fold_rule(FeedForward)(lambda module: [Reads('fc1')])
fold_rule(EncoderLayer, DecoderLayer)(residual_layer)


@fold_rule(UNTransformer, methods=('forward', 'encode', 'decode'))
def un_transformer(model):
    memory = [f'decoder.{i}.cross_attn.kv' for i in range(len(model.decoder))]
    for stack, readers in (('encoder', memory), ('decoder', ['output'])):
        final = f'{stack}_norm'
        if stations := stations_of(getattr(model, stack), stack):
            yield Stream(stations)
            final = stations[-1].norm
        yield Into(final, *readers)
    yield Unties('output')
