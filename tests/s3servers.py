"An S3 server in threads of this process, which checks signatures"
import json, logging, os, uuid
from contextlib import contextmanager
from functools import lru_cache

import boto3
from botocore.config import Config
from moto import backends, settings
from moto.moto_api._internal.models import moto_api_backend
from moto.server import ThreadedMotoServer

# What boto3 and s3fs must be told for servers that do not know the newer checksums
WHEN_REQUIRED = dict(request_checksum_calculation='when_required', response_checksum_validation='when_required')

@lru_cache(maxsize=8)
def _client(process, service, arguments):
    return boto3.client(service, region_name='us-east-1', config=Config(**WHEN_REQUIRED), **dict(arguments))

class S3Server:
    "A server that runs: where, a user who may use S3, and a bucket"
    def __init__(self, endpoint):
        self.endpoint,self.key,self.secret = endpoint,'nobody','nothing'
        iam,allowed = self.client('iam'),{'Effect':'Allow', 'Action':'s3:*', 'Resource':'*'}
        iam.create_user(UserName='me')
        policy = json.dumps({'Version':'2012-10-17', 'Statement':[allowed]})
        iam.put_user_policy(UserName='me', PolicyName='all', PolicyDocument=policy)
        key = iam.create_access_key(UserName='me')['AccessKey']
        self.key,self.secret,self.bucket = key['AccessKeyId'],key['SecretAccessKey'],'b-'+uuid.uuid4().hex[:8]
        self.client().create_bucket(Bucket=self.bucket)

    @property
    def options(self):
        "Storage options for `s3fs`"
        return dict(endpoint_url=self.endpoint, key=self.key, secret=self.secret, config_kwargs=WHEN_REQUIRED)

    def client(self, service='s3'):
        "A client of boto3; it is made once, as that takes longer than most requests"
        names = dict(endpoint_url=self.endpoint, aws_access_key_id=self.key, aws_secret_access_key=self.secret)
        return _client(os.getpid(), service, tuple(names.items()))

    def __repr__(self): return f'S3Server({self.endpoint!r})'

@contextmanager
def moto_server():
    "A server that starts in half a second; one at a time"
    logging.getLogger('werkzeug').setLevel('ERROR')   # a line a request
    names,unchecked = list(backends.list_of_moto_modules()),settings.INITIAL_NO_AUTH_ACTION_COUNT
    backends.list_of_moto_modules = lambda: names   # it lists a folder for each request, in almost half of moto's time
    server = ThreadedMotoServer('127.0.0.1', 0, verbose=False)
    server.start()
    try:
        found = S3Server('http://{}:{}'.format(*server.get_host_and_port()))
        settings.INITIAL_NO_AUTH_ACTION_COUNT = 0   # from now on, signatures and rights are checked
        yield found
    finally:
        settings.INITIAL_NO_AUTH_ACTION_COUNT = unchecked
        server.stop()
        moto_api_backend.reset()
