"""Input data: where its time goes, what wins it back, and a DataLoader that resumes mid-epoch, on any number of ranks.

Public names are resolved on first use, through one literal table; only those of the loader need torch.

>>> import headway.data
>>> headway.data.permute.__module__
'headway.data.orders.order'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.core.lazy import lazily

if TYPE_CHECKING:
    from headway.data.caches.cache import TieredCache as TieredCache
    from headway.data.caches.partition import PartitionMap as PartitionMap
    from headway.data.caches.partition import partition_cache as partition_cache
    from headway.data.caches.partitioned import Partitioned as Partitioned
    from headway.data.fleet.autoscale import Autoscaler as Autoscaler
    from headway.data.fleet.master import Master as Master
    from headway.data.jagged import DedupJagged as DedupJagged
    from headway.data.jagged import Jagged as Jagged
    from headway.data.jagged import dedup as dedup
    from headway.data.object_source import ObjectSource as ObjectSource
    from headway.data.object_source import ObjectTarSource as ObjectTarSource
    from headway.data.orders.choice import Reader as Reader
    from headway.data.orders.choice import choose_order as choose_order
    from headway.data.orders.dependent import Dependent as Dependent
    from headway.data.orders.job_order import Buffered as Buffered
    from headway.data.orders.job_order import DataShareError as DataShareError
    from headway.data.orders.opportunistic import Opportunistic as Opportunistic
    from headway.data.orders.order import permute as permute
    from headway.data.orders.strategies import Independent as Independent
    from headway.data.orders.strategies import Shared as Shared
    from headway.data.planning.optimize import PipelinePlan as PipelinePlan
    from headway.data.planning.optimize import Resources as Resources
    from headway.data.planning.pipeline import plan as plan
    from headway.data.planning.pipeline import profile as profile
    from headway.data.runtime.caching.partitioned import over_ranks as over_ranks
    from headway.data.runtime.examples.keyed import generator as generator
    from headway.data.runtime.examples.keyed import torch_generator as torch_generator
    from headway.data.runtime.fleets.fleet import Fleet as Fleet
    from headway.data.runtime.fleets.ray_workers import RayFleet as RayFleet
    from headway.data.runtime.loader.loader import DataLoader as DataLoader
    from headway.data.runtime.loader.loader import DatasetChangedError as DatasetChangedError
    from headway.data.runtime.loader.pipeline import Pipeline as Pipeline
    from headway.data.runtime.loader.select import WithIds as WithIds
    from headway.data.runtime.loader.select import scoring as scoring
    from headway.data.select import LossSelector as LossSelector
    from headway.data.serving.server import DataServer as DataServer
    from headway.data.sessions import cluster_parquet as cluster_parquet
    from headway.data.sessions import session_order as session_order
    from headway.data.source import FolderSource as FolderSource
    from headway.data.source import ParquetSource as ParquetSource
    from headway.data.source import SyntheticJpeg as SyntheticJpeg
    from headway.data.source import TarSource as TarSource
    from headway.data.source import Throttled as Throttled

PUBLIC: dict[str, str] = {
    "Autoscaler": "headway.data.fleet.autoscale:Autoscaler",
    "Buffered": "headway.data.orders.job_order:Buffered",
    "DataLoader": "headway.data.runtime.loader.loader:DataLoader",
    "DataServer": "headway.data.serving.server:DataServer",
    "DataShareError": "headway.data.orders.job_order:DataShareError",
    "DatasetChangedError": "headway.data.runtime.loader.loader:DatasetChangedError",
    "DedupJagged": "headway.data.jagged:DedupJagged",
    "Dependent": "headway.data.orders.dependent:Dependent",
    "Fleet": "headway.data.runtime.fleets.fleet:Fleet",
    "FolderSource": "headway.data.source:FolderSource",
    "Independent": "headway.data.orders.strategies:Independent",
    "Jagged": "headway.data.jagged:Jagged",
    "LossSelector": "headway.data.select:LossSelector",
    "Master": "headway.data.fleet.master:Master",
    "ObjectSource": "headway.data.object_source:ObjectSource",
    "ObjectTarSource": "headway.data.object_source:ObjectTarSource",
    "Opportunistic": "headway.data.orders.opportunistic:Opportunistic",
    "ParquetSource": "headway.data.source:ParquetSource",
    "PartitionMap": "headway.data.caches.partition:PartitionMap",
    "Partitioned": "headway.data.caches.partitioned:Partitioned",
    "Pipeline": "headway.data.runtime.loader.pipeline:Pipeline",
    "PipelinePlan": "headway.data.planning.optimize:PipelinePlan",
    "RayFleet": "headway.data.runtime.fleets.ray_workers:RayFleet",
    "Reader": "headway.data.orders.choice:Reader",
    "Resources": "headway.data.planning.optimize:Resources",
    "Shared": "headway.data.orders.strategies:Shared",
    "SyntheticJpeg": "headway.data.source:SyntheticJpeg",
    "TarSource": "headway.data.source:TarSource",
    "Throttled": "headway.data.source:Throttled",
    "TieredCache": "headway.data.caches.cache:TieredCache",
    "WithIds": "headway.data.runtime.loader.select:WithIds",
    "choose_order": "headway.data.orders.choice:choose_order",
    "cluster_parquet": "headway.data.sessions:cluster_parquet",
    "dedup": "headway.data.jagged:dedup",
    "generator": "headway.data.runtime.examples.keyed:generator",
    "over_ranks": "headway.data.runtime.caching.partitioned:over_ranks",
    "partition_cache": "headway.data.caches.partition:partition_cache",
    "permute": "headway.data.orders.order:permute",
    "plan": "headway.data.planning.pipeline:plan",
    "profile": "headway.data.planning.pipeline:profile",
    "scoring": "headway.data.runtime.loader.select:scoring",
    "session_order": "headway.data.sessions:session_order",
    "torch_generator": "headway.data.runtime.examples.keyed:torch_generator",
}
"""Every lazily loaded public name -> "module:attribute"."""


__all__ = list(PUBLIC)
__getattr__, __dir__ = lazily(__name__, PUBLIC)
