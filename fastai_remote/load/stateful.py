"""The state of torchdata's `StatefulDataLoader`, for another number of workers

Docs: page `load/stateful`"""

# torchdata loads a state only into a loader with the number of workers that saved it, because the state has an entry
# for each worker. Batches of a `RemoteDataset` need one place: their order, which the first process of the epoch made,
# and how many of them the loader has given. `for_workers` writes that place into a state for other workers.

import torch

from .epochs import share_of

def for_workers(
    state:dict, # What `StatefulDataLoader.state_dict` returned, of a loader of `ds.batches(…)` or `ds.batched(…)`
    num_workers:int # Workers of the loader that is to go on; 0: none
)->dict: # What `load_state_dict` of that loader takes
    """The same place in the same order, for another number of workers: `loader.load_state_dict(for_workers(state, 3))`

    Raises `ValueError` for a state of anything else: what a worker makes of a stream, or of samples that may be left
    out, depends on the number of workers."""
    snapshot = state.get('_snapshot')   # only with workers
    main = state if snapshot is None else snapshot['_main_snapshot']
    given = state['_num_yielded'] if snapshot is None else snapshot['_snapshot_step']+state['_steps_since_snapshot']
    sampler = main['_sampler_iter_state']   # of `ds.batches`; a worker of `ds.batched` has a state of its own
    workers = [state] if snapshot is None else list(snapshot['_worker_snapshots'].values())
    place = sampler or ((workers[0] or {}).get('fetcher_state') or {}).get('dataset_iter_state')
    if not isinstance(place, dict) or place.get('lanes') is None:
        raise ValueError('this state is not of batches that are all known in advance: it can only be continued with '
                         'the number of workers that it was saved with')
    count = max(num_workers, 1)
    def at(worker, n): return dict(place, worker=worker, num_workers=count, count=n)
    def fetcher(worker):
        if sampler: return None
        return {'dataset_iter_state':at(worker, share_of(given, worker, count)), 'fetcher_ended':False}
    result = {name:main[name] for name in ('_index_sampler_state','_IterableDataset_len_called','_shared_seed')}
    result |= {'_sampler_iter_state':at(0, given) if sampler else None, '_sampler_iter_yielded':given}
    finished = {'_iterator_finished':state['_iterator_finished']}
    if not num_workers:
        return {**result, '_num_yielded':given, 'dataset_state':None, 'fetcher_state':fetcher(0), **finished}
    base_seed = main.get('_base_seed', torch.initial_seed())   # of the random numbers of workers
    return {'_snapshot':{'_snapshot_step':given, '_last_yielded_worker_id':(given-1)%count,
                         '_main_snapshot':{**result, '_num_workers':num_workers, '_base_seed':base_seed},
                         '_worker_snapshots':{f'worker_{w}':{'worker_id':w, 'dataset_state':None,
                                                             'fetcher_state':fetcher(w)} for w in range(num_workers)}},
            '_steps_since_snapshot':0, **finished}
