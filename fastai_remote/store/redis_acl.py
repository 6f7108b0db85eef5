"""Which rights the user of a connection needs and lacks, and errors that name them

Docs: page `store/redis_acl`"""

# A server refuses a key with 'No permissions to access a key', and does not say which one. The guide on credentials
# lists the rights that a reader and a writer need. An error should name the one that is missing.

import re

import hiredis
import redis

_ALL_KEYS = 'MGET','DEL','UNLINK','WATCH'   # commands whose arguments are all keys

def key_pattern(
    key:str # A key of a dataset
)->str:
    """The pattern of an access list that allows `key`, and the keys of all versions of its dataset that begin alike

    It is `pets@*` for 'pets@7c1:jpg:7', `pets:*` for 'pets:meta', and `{pets.*` for '{pets.3}:jpg:7' in a cluster."""
    prefix = key.split(':')[0]
    if prefix[:1]=='{':   # in a cluster: `{NAME}`, `{NAME.3}` or `{NAME@7c1.3}`
        name,end = re.fullmatch(r'\{(.*?)(@\w+\.\d+|\.\d+)?(?:\}.*)?', prefix, re.S).groups()
        return f"{{{name}{end[0]}*" if end else f'{{{name}}}*'
    return re.sub(r'@\w+$', '@*', prefix) if re.search(r'@\w+$', prefix) else f'{prefix}:*'

def missing_right(
    reply:str, # What the server answered
    command:tuple # The command and its arguments
)->str:
    """A sentence that names the right which the user of a connection lacks

    It is the right to the keys in `command`, such as `~pets:*`, if there are arguments and the reply speaks of keys,
    and else the right to the command, such as `+get`."""
    name = str(command[0]).upper()
    # `reply` may also contain the name of the user, which has no spaces
    if len(command)==1 or not re.search(r' permissions to access .*\bkeys?\b', reply):
        right = name.lower().replace(' ', '|')
        return f'this user may not run {name}: its access list (ACL) needs +{right} ({reply})'
    keys = [key.decode(errors='replace') if isinstance(key, bytes) else str(key) for key in command[1:]]
    if name not in _ALL_KEYS: keys = keys[:1]
    patterns = ' '.join(dict.fromkeys(f'~{key_pattern(key)}' for key in keys))
    return f'this user may not {name} {keys[0]!r}: its access list (ACL) needs {patterns} ({reply})'

# The client adds this sentence where a command fails, because only there the command is known.

def explain_missing_right(
    error:redis.exceptions.NoPermissionError, # What redis-py made of the server's answer
    command:tuple # The command and its arguments
):
    "Makes the message of `error` that of `missing_right`"
    error.args = (missing_right(str(error), command),)

class _ExplainingPipeline(redis.client.Pipeline):
    "A pipeline of `ExplainingClient`: errors about missing rights name the command, or the pattern of keys"
    def immediate_execute_command(self, *args, **options):
        try: return super().immediate_execute_command(*args, **options)
        except redis.exceptions.NoPermissionError as error:
            explain_missing_right(error, args)
            raise

    def annotate_exception(self, exception, number, command):
        if isinstance(exception, redis.exceptions.NoPermissionError): explain_missing_right(exception, command)
        else: super().annotate_exception(exception, number, command)

    def execute(self, raise_on_error=True):
        try: return super().execute(raise_on_error)
        except redis.ResponseError as error:
            reply = str(error)
            if 'EXEC without MULTI' in reply: command = 'MULTI'
            elif isinstance(error, redis.exceptions.ExecAbortError) and 'NOPERM' in reply: command = 'EXEC'
            else: raise
            raise redis.exceptions.NoPermissionError(missing_right(reply, (command,))) from error

    def reset(self):
        try: super().reset()
        except redis.exceptions.NoPermissionError as error:
            explain_missing_right(error, ('UNWATCH',))
            raise

class _Explaining:
    """Mixin for a client of redis-py: errors about missing rights name the command, or the pattern of keys

    It comes before the client among the base classes."""
    def execute_command(self, *args, **options):
        try: return super().execute_command(*args, **options)
        except redis.exceptions.NoPermissionError as error:
            explain_missing_right(error, args)
            raise

class ExplainingClient(_Explaining, redis.Redis):
    "A client of Redis whose errors about missing rights name the command, or the pattern of keys"
    def pipeline(self, transaction=True, shard_hint=None):
        return _ExplainingPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

class ExplainingCluster(_Explaining, redis.RedisCluster):
    "A client of a cluster whose errors about missing rights name the command, or the pattern of keys; not in pipelines"

# --- Rights of a user

# A server checks the rights of a user on a command before it queues the command in a transaction. A transaction that is
# not executed has changed nothing. So the rights to write are tested without writing. Reading is tested by reading keys
# that do not exist.

# What is sent to train, and to write: the name of a command and the arguments after its key
READ_COMMANDS = ('MGET',),('GETRANGE',0,0),('BITFIELD_RO','GET','u1',0),('STRLEN',)
WRITE_COMMANDS = (('GET',), ('SET','a'), ('MSET','a'), ('SETRANGE',0,'a'), ('DEL',), ('UNLINK',), ('HSET','a','b'),
                  ('HDEL','a'), ('EXPIRE',1))

def missing_rights(
    client, # A `redis.Redis`
    commands, # Tuples of a name and arguments; in a transaction, the first argument of the first one is a key
    in_transaction # Only queue them after MULTI, and discard them? Commands that write must not be sent without
):
    """Returns the rights that the user lacks for `commands`, such as `+set` or `~pets:*`: a list of texts

    In a transaction, nothing is changed, and WATCH, UNWATCH, MULTI and EXEC are tried, too. Without the right to MULTI,
    `commands` are not tried."""
    refused,client = [],client.client()   # one connection
    def run(*command):
        client.connection.send_packed_command([hiredis.pack_command(command)])
        try: client.connection.read_response()
        except (redis.exceptions.NoPermissionError,redis.exceptions.ExecAbortError) as e:   # the latter of EXEC
            if command[0]=='MEMORY': command = 'MEMORY USAGE',command[2]
            refused.append(re.search(r' needs (.*?) \(', missing_right(str(e), command))[1])
        except redis.ResponseError: pass   # a command that the server does not know, or a key of another node
    try:
        if in_transaction:
            run('WATCH', commands[0][1])
            run('UNWATCH')
            run('MULTI')
            if '+multi' not in refused:
                run('EXEC')   # of nothing
                run('MULTI')
        if '+multi' not in refused:
            for command in commands: run(*command)
    finally:
        client.connection.disconnect()   # this discards a transaction
        client.close()
    return list(dict.fromkeys(refused))
